"""What a mixture of experts refuses, before anything runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import nn
from jaxdist.errors import ArgumentError, ArgumentTypeError, AxisNameError, ContextError, ShapeError
from tests.nn.experts_oracle import expert, make, make_params, make_rows, weights_of

PARAMS, X = make_params(), make_rows(2)


def _call(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "expert": expert,
        "router": PARAMS["router"],
        "weights": weights_of(PARAMS),
        "x": X,
        "top_k": 2,
        **changed,
    }
    return nn.experts(**given)


REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"expert": 3}, ArgumentTypeError, ["expert=3", "weights of one expert"]),
    ({"x": X[0, 0]}, ShapeError, [r"x of the shape \[6\]", "1 more dim"]),
    ({"x": np.float32(1)}, ShapeError, [r"x of the shape \[\]", "2 more dim"]),
    ({"x": np.ones((2, 12, 6), int)}, ArgumentTypeError, ["x of the dtype int", "floating"]),
    ({"x": "rows"}, ArgumentTypeError, ["x='rows'"]),
    ({"router": np.ones((6, 8), int)}, ArgumentTypeError, ["router of the dtype int"]),
    (
        {"router": PARAMS["router"].T},
        ShapeError,
        [r"router of the shape \[8, 6\]", r"x of the shape \[2, 12, 6\]", r"Pass router\.T"],
    ),
    ({"router": np.ones((5, 8))}, ShapeError, [r"\[5, 8\]", r"Pass a matrix of the shape \[6, "]),
    ({"router": np.ones(8)}, ShapeError, [r"router of the shape \[8\]"]),
    ({"router": np.ones((6, 0))}, ArgumentError, ["top_k=2", "0 columns", "Pass a router"]),
    ({"weights": None}, ArgumentTypeError, ["weights=None", "no array"]),
    ({"weights": {"w": "text"}}, ArgumentTypeError, [r"weights\['w'\]='text'"]),
    ({"weights": {"a": [np.ones(())]}}, ShapeError, [r"weights\['a'\]\[0\]", r"shape \[\]"]),
    (
        {"weights": {"up": np.ones((4, 6))}},
        ShapeError,
        [r"weights\['up'\] of the shape \[4, 6\]", "8 columns", "router with 4 columns"],
    ),
    (
        {"weights": {"up": np.ones((6, 8, 6))}},
        ShapeError,
        [r"\[6, 8, 6\]", r"jnp\.moveaxis\(leaf, 1, 0\)"],
    ),
    ({"top_k": 9}, ArgumentError, ["top_k=9", "8 columns", "from 1 to 8"]),
    ({"top_k": 0}, ArgumentError, ["top_k=0"]),
    ({"top_k": 2.0}, ArgumentTypeError, ["top_k=2.0"]),
    ({"capacity": 0}, ArgumentError, ["capacity=0"]),
    ({"capacity": -1.5}, ArgumentError, ["capacity=-1.5"]),
    ({"capacity": float("nan")}, ArgumentError, ["capacity=nan"]),
    ({"capacity": float("inf")}, ArgumentError, ["capacity=inf", "None"]),
    ({"capacity": True}, ArgumentTypeError, ["capacity=True"]),
    ({"capacity": "1.25"}, ArgumentTypeError, ["capacity='1.25'"]),
    ({"group": 5}, ShapeError, ["group=5", "12 tokens", "Pass group=4 or 6"]),
    ({"group": 24}, ShapeError, ["group=24", "Pass group=12"]),
    ({"group": 0}, ArgumentError, ["group=0"]),
    ({"group": 4.0}, ArgumentTypeError, ["group=4.0"]),
    ({"axis": 3}, ArgumentTypeError, ["axis=3"]),
    (
        {"expert": lambda w, rows: rows @ w["up"]},
        ShapeError,
        [r"expert, which returned float32\[8, 10\] for rows float32\[8, 6\]", "6 columns"],
    ),
    (
        {"x": X.astype(jnp.bfloat16)},
        ShapeError,
        [r"returned float32\[", r"rows bfloat16\[", r"astype\(rows\.dtype\)"],
    ),
    ({"expert": lambda w, rows: (rows, rows)}, ArgumentTypeError, ["expert, which returned"]),
    ({"expert": lambda w, rows: None}, ArgumentTypeError, ["expert, which returned None"]),
    (
        {"x": jaxdist.PerReplica([X, X])},
        ArgumentTypeError,
        ["x with PerReplica", "args of strategy.run"],
    ),
    (
        {"weights": {"w": jaxdist.PerReplica([X, X])}},
        ArgumentTypeError,
        ["weights with PerReplica"],
    ),
]


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSED)
def test_a_wrong_argument_is_named_with_what_fits(
    changed: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as error:
        _call(**changed)
    text = str(error.value)
    assert text.startswith("nn.experts was given ")
    assert text.count("\n\n") == 2
    for word in words:
        assert error.match(word)


def test_the_result_of_an_expert_is_checked_before_a_step_runs() -> None:
    with pytest.raises(ShapeError, match=r"returned float32\[8, 10\] for rows"):
        make((2, 4)).run(lambda x: _call(x=x, expert=lambda w, rows: rows @ w["up"])[0], (X,))


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (6, ["6 columns", "'experts' of 4 devices", "Use 4 or 8 experts", "2 or 3 or 6 devices"]),
        (2, ["2 columns", "Use 4 experts", "axis of 2 devices"]),
        (1, ["1 columns", "Use 4 experts", "axis of 1 device."]),
    ],
)
def test_experts_that_the_devices_do_not_divide_are_refused(experts: int, words: list[str]) -> None:
    params = make_params(experts=experts)

    def step(x: Any) -> Any:
        return _call(x=x, router=params["router"], weights=weights_of(params), top_k=1)[0]

    with pytest.raises(ShapeError) as error:
        make((2, 4)).run(step, (X,))
    for word in words:
        assert error.match(word)


def test_an_axis_that_is_wrong_is_refused() -> None:
    strategy = make((2, 4))
    with pytest.raises(ArgumentError, match=r"Pass axis='experts'"):
        strategy.run(lambda x: _call(x=x, axis="expert")[0], (X,))

    def divided(x: Any) -> Any:
        spec = jax.P("experts")
        fn = jax.shard_map(
            lambda x: _call(x=x)[0], in_specs=spec, out_specs=spec, axis_names={"experts"}
        )
        return fn(jnp.concatenate([x] * 2))

    with pytest.raises(ContextError, match="divided over this axis already"):
        strategy.run(divided, (X,))


def test_tokens_without_rows_need_a_group_where_replicas_would_be_groups() -> None:
    rows = X[0]
    wanted, _ = _call(x=rows)

    def step(x: Any) -> Any:
        return _call(x=x)[0]

    with pytest.raises(ShapeError, match=r"without rows and without group, on 2 replicas"):
        make((2, 4)).run(step, (rows,))
    with pytest.raises(ShapeError, match=r"Pass group=12 if these tokens are one row"):
        make((2, 4)).run(lambda x: jax.vmap(step)(x), (X,))
    one = make((1, 4)).run(step, (rows,))
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
    mapped = make((2, 4)).run(lambda x: jax.vmap(lambda x: _call(x=x, group=12)[0])(x), (X,))
    np.testing.assert_allclose(mapped[0], wanted, rtol=1e-5, atol=1e-6)


def test_an_expert_may_not_exchange_rows_with_other_experts() -> None:
    def step(x: Any) -> Any:
        return _call(x=x, expert=lambda w, rows: jax.lax.psum(expert(w, rows), "experts"))[0]

    for layout in ((2, 4), (1, 8)):
        with pytest.raises(AxisNameError, match="'experts'"):
            make(layout).run(step, (X,))
    with jaxdist.config.run_eagerly(True), pytest.raises(AxisNameError, match="'experts'"):
        make((2, 4)).run(step, (X,))
