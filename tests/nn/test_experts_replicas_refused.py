"""What experts over an axis of replicas refuse, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context, nn, partition
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisNameError,
    ContextError,
    DivergentCollectiveError,
    JaxdistError,
    ShapeError,
    ShardedArrayError,
)
from jaxdist.partition import Replicate, Shard
from tests.nn.experts_oracle import (
    Params,
    expert,
    make_mesh,
    make_params,
    make_rows,
    place_pieces,
    weights_of,
)

PARAMS, X = make_params(), make_rows()
Step = Callable[[Any, Any], Any]


def _call(params: Params, x: Any, of_one: Any = expert, **options: Any) -> Any:
    options = {"top_k": 2, "axis": "data", **options}
    return nn.experts(of_one, params["router"], weights_of(params), x, **options)[0]


def _fail(
    kind: type[JaxdistError],
    step: Step = _call,
    *,
    strategy: jaxdist.Strategy | None = None,
    params: Any = None,
    eagerly: bool = False,
) -> str:
    """Return the text of the error of a step."""
    strategy = strategy or make_mesh((4,))
    params = place_pieces(strategy, PARAMS) if params is None else params
    rows = jax.device_put(X, strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(eagerly), pytest.raises(kind) as error:
        strategy.run(step, (params, rows))
    return str(error.value)


def _contains(text: str, *parts: str) -> bool:
    assert text.count("\n\n") == 2
    assert [p for p in parts if p not in text] == []
    return True


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_weights_that_are_not_pieces_of_whole_experts_are_refused_with_the_rule(
    eagerly: bool,
) -> None:
    one, two = make_mesh((4,)), make_mesh((2, 4), ("slice", "data"), ("slice", "data"))
    pieces = Shard(0, axes=("data",))
    cases: list[tuple[jaxdist.Strategy, Any, Any, type[JaxdistError], list[str]]] = [
        (
            one,
            Replicate(),
            Shard(0, pad=True),
            ArgumentTypeError,
            ["weights['up'], float32[8, 6, 10], whole on each replica", "4 replicas", "Shard(0))"],
        ),
        (
            one,
            Shard(1, pad=True),
            Shard(0, pad=True),
            ArgumentError,
            ["weights['up'], Sharded(float32[8, 6, 10] cut along dim 1", "Shard(0))"],
        ),
        (
            two,
            Shard(0),
            Replicate(),
            ArgumentTypeError,
            ["weights['down'], float32[8, 10, 6], whole", "Shard(0, axes=('data',))"],
        ),
        (
            two,
            Shard(0),
            pieces,
            ArgumentError,
            ["over the axes ['slice', 'data']", "axis='data'", "Shard(0, axes=('data',))"],
        ),
        (two, Shard(0, axes=("slice",)), pieces, ArgumentError, ["over the axes ['slice']"]),
    ]
    for strategy, placement, others, kind, parts in cases:
        rules = partition.Rules(
            [("up", placement), ("down", others)], otherwise=partition.Replicate()
        )
        params = partition.place(strategy, PARAMS, rules)
        text = _fail(kind, strategy=strategy, params=params, eagerly=eagerly)
        assert text.startswith("nn.experts was given weights[")
        assert _contains(text, *parts)


def test_weights_that_the_step_has_made_whole_are_refused() -> None:
    def gathered(params: Params, x: Any) -> Any:
        return _call(partition.gather(params), x)

    assert _contains(_fail(ArgumentTypeError, gathered), "whole on each replica", "not gathered")

    def with_text(params: Params, x: Any) -> Any:
        weights = {"up": params["up"], "name": "text"}
        return nn.experts(expert, params["router"], weights, x, top_k=2, axis="data")[0]

    assert _contains(_fail(ArgumentTypeError, with_text), "weights['name'], 'text'")


def test_weights_that_the_step_has_assigned_or_not_got_as_an_argument_are_refused() -> None:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Param(jnp.asarray(PARAMS["up"]))
            self.down = nnx.Param(jnp.asarray(PARAMS["down"]))

    def of_module(w: Layer, rows: Any) -> Any:
        return jnp.tanh(rows @ w.up[...]) @ w.down[...]

    def step(layer: Layer, x: Any) -> Any:
        layer.up[...] = jnp.zeros(PARAMS["up"].shape)
        return nn.experts(of_module, PARAMS["router"], layer, x, top_k=2, axis="data")[0]

    strategy = make_mesh((4,))
    layer = place_pieces(strategy, Layer())
    text = _fail(ArgumentTypeError, step, params=layer)
    assert _contains(text, "weights['up']", "assigned a whole array", "Return the new value")

    placed = place_pieces(strategy, PARAMS)
    text = _fail(ArgumentTypeError, lambda _, x: _call(placed, x), params=PARAMS)
    assert _contains(text, "weights['down'], Sharded(", "not an argument", "args of strategy.run")


def test_experts_that_the_replicas_do_not_divide_are_refused() -> None:
    strategy = make_mesh((4,))
    params = make_params(experts=6)
    rules = partition.Rules([], otherwise=Shard(0, pad=True))
    text = _fail(ShapeError, params=partition.place(strategy, params, rules))
    assert _contains(text, "6 columns", "'data' of 4 replicas", "Use 4 or 8", "6 replicas")


def test_leaves_without_a_row_for_each_expert_are_refused() -> None:
    strategy = make_mesh((4,))
    params = {**PARAMS, "up": np.ones((4, 6, 10), np.float32)}
    text = _fail(ShapeError, params=place_pieces(strategy, params))
    assert _contains(text, "weights['up'] of the shape [4, 6, 10]", "8 columns")


_WRAPPERS: list[Callable[[Any], Any]] = [
    jax.jit,
    jax.checkpoint,
    jax.vmap,
    lambda fn: lambda rows: jax.lax.scan(lambda c, _: (fn(c), None), rows, None, 2)[0],
    lambda fn: lambda rows: jax.lax.cond(rows.sum() > 0, fn, lambda r: r, rows),
    lambda fn: _with_gradient(lambda x: x, lambda _, ct: (fn(ct),)),
    lambda fn: _with_gradient(fn, lambda _, ct: (ct,)),
]


def _with_gradient(fn: Any, backward: Any) -> Any:
    own = jax.custom_vjp(fn)
    own.defvjp(lambda x: (fn(x), None), backward)
    return own


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_an_expert_that_uses_other_arrays_of_the_step_is_refused(eagerly: bool) -> None:
    def of_rows(params: Params, x: Any) -> Any:
        scale = x.mean()
        return _call(params, x, lambda w, rows: expert(w, rows) * scale)

    def of_parameters(params: Params, x: Any) -> Any:
        return _call(params, x, lambda w, rows: expert(w, rows) * params["router"].sum())

    def of_pieces(params: Params, x: Any) -> Any:
        return _call(params, x, lambda w, rows: expert(w, rows) * jnp.sum(params["up"][0]))

    def inside(wrap: Callable[[Any], Any]) -> Step:
        def step(params: Params, x: Any) -> Any:
            scale = x.mean()
            scaled = wrap(lambda rows: rows * scale)
            return _call(params, x, lambda w, rows: scaled(expert(w, rows)))

        return step

    for step in (of_rows, of_parameters, of_pieces, *map(inside, _WRAPPERS)):
        text = _fail(ContextError, step, eagerly=eagerly)
        assert _contains(
            text, "uses arrays of the step besides its arguments: float32[", "in weights"
        )


@jax.custom_vjp
def _summed_backward(x: Any) -> Any:
    return x


_summed_backward.defvjp(lambda x: (x, None), lambda _, ct: (jax.lax.psum(ct, "data"),))

COLLECTIVES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "psum": (lambda r: jax.lax.psum(r, "data"), "psum"),
    "ppermute": (lambda r: jax.lax.ppermute(r, "data", [(0, 1), (1, 0)]), "ppermute"),
    "axis_index": (lambda r: r * jax.lax.axis_index("data"), "axis_index"),
    "all_reduce": (lambda r: get_replica_context().all_reduce("mean", r), "psum"),
    "replica": (lambda r: r * get_replica_context().replica_id_in_sync_group, "axis_index"),
    "scan": (
        lambda r: jax.lax.scan(lambda c, _: (jax.lax.pmax(c, "data"), None), r, None, 2)[0],
        "pmax",
    ),
    "checkpoint": (jax.checkpoint(lambda r: jax.lax.psum(r, ("data",))), "psum"),
    "gradient": (_summed_backward, "psum"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_expert_may_not_combine_rows_of_different_experts(name: str) -> None:
    combine, operation = COLLECTIVES[name]

    def step(params: Params, x: Any) -> Any:
        return _call(params, x, lambda w, rows: combine(expert(w, rows)))

    for eagerly in (False, True) if name in ("psum", "ppermute", "gradient") else (False,):
        text = _fail(AxisNameError, step, eagerly=eagerly)
        assert _contains(text, f"expert, which calls {operation} over 'data'", "different experts")


def test_an_expert_without_a_derivative_computes_in_steps_that_take_none() -> None:
    def halved(w: Params, rows: Any) -> Any:
        return jax.lax.while_loop(
            lambda r: jnp.abs(r).max() > 0.1, lambda r: r / 2, expert(w, rows)
        )

    strategy = make_mesh((4,))
    rows = jax.device_put(X, strategy.per_replica_sharding)

    def step(params: Params, x: Any) -> Any:
        return _call(params, x, halved, capacity=None)

    found = strategy.run(step, (place_pieces(strategy, PARAMS), rows))
    assert np.abs(strategy.gather(found, axis=0)).max() <= 0.1


def test_a_vmap_with_the_name_of_the_axis_is_refused() -> None:
    def step(params: Params, x: Any) -> Any:
        return jax.vmap(lambda x: _call(params, x, group=12), axis_name="data")(x)

    for eagerly in (False, True):
        text = _fail(ContextError, step, eagerly=eagerly)
        assert _contains(text, "nn.experts was called under jax.vmap(axis_name='data')")


def test_a_branch_that_some_replicas_do_not_take_is_refused() -> None:
    def step(params: Params, x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda: _call(params, x).sum(), lambda: 0.0)

    text = _fail(DivergentCollectiveError, step)
    assert "all_to_all" in text
    _fail(ShardedArrayError, lambda params, x: jax.grad(step)(params, x))


def test_stages_of_a_pipeline_and_maps_over_other_axes_are_refused() -> None:
    strategy = make_mesh((2, 2), ("data", "stage"))
    two = jax.tree.map(lambda p: np.stack([p, p]), PARAMS)
    rules = partition.Rules([], otherwise=partition.Stage(Shard(0, pad=True)))

    def in_stages(params: Params, x: Any) -> Any:
        return nn.pipeline_loss(
            lambda _, rows: rows,
            lambda w, x: x + _call(w, x),
            lambda _, x, rows: (x**2).mean(),
            ((), params, ()),
            x,
            micro_batches=2,
        )

    placed = partition.place(strategy, two, rules)
    text = _fail(ArgumentTypeError, in_stages, strategy=strategy, params=placed)
    assert _contains(text, "Inside of nn.pipeline_loss they are gathered", "['stage']")

    def mapped(params: Params, x: Any) -> Any:
        fn = jax.shard_map(
            lambda x: _call(params, x),
            in_specs=jax.P("stage"),
            out_specs=jax.P("stage"),
            axis_names={"stage"},
            check_vma=False,
        )
        return fn(x)

    text = _fail(ContextError, mapped, strategy=strategy)
    assert _contains(text, "work is divided over ['stage']", "outside of that function.")
    assert text.endswith("function.")
    three = make_mesh((2, 2, 2), ("data", "stage", "experts"))
    assert _fail(ContextError, mapped, strategy=three).endswith("replica: axis='experts'.")


def test_the_nearest_axis_may_be_one_of_replicas() -> None:
    strategy = make_mesh((2, 2), ("data", "model"))

    def step(params: Params, x: Any) -> Any:
        return _call(params, x, axis="date")

    text = _fail(ArgumentError, step, strategy=strategy, params=PARAMS)
    assert _contains(text, "axis='date'", "['model', 'data']", "Pass axis='data'.")
