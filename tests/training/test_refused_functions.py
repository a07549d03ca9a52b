"""Loops and evaluations refuse functions that return something else than they take, by name."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.errors import ArgumentError, ArgumentTypeError, JaxdistError, ShapeError
from jaxdist.training import accumulate_gradients, evaluate, multi_step, run_loop, weighted_sums
from tests.strategies.oracle import refused

ONE = jaxdist.MirroredStrategy(["cpu:0"])


def evaluate_sums(sums: Callable[[Any, Any], Any]) -> Any:
    """Evaluate with a function of the rows and the mask."""
    strategy = jaxdist.MirroredStrategy(["cpu:0"])
    data = [{"x": jnp.ones(4)}]
    return evaluate(strategy, lambda model, batch, mask: sums(batch["x"], mask), 1.0, data)


def give_text() -> Any:
    """A state that is no array."""
    return ["old"]


def mix_keys(x: Any) -> Any:
    """A dict that JAX cannot sort."""
    return {"loss": x, 1: x}


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "a step of the loop that returns one value": (
        lambda: run_loop(0, lambda state, batch: state, [1, 2]),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("run_loop was given step_fn, which returned 0", "(state, out)"),
    ),
    "a step of several that returns one value": (
        lambda: multi_step(lambda state, batch: state)(0.0, [jnp.ones(2)]),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("multi_step called step_fn, and it returned", "return state, None"),
    ),
    "a step of several that returns a text": (
        lambda: multi_step(lambda state, batch: (state, {"loss": [1.0, "low"]}))(
            0.0, [jnp.ones(2)]
        ),
        ArgumentTypeError,
        ("multi_step called step_fn", "result[1]['loss'][1]: 'low', of type str", "Return arrays"),
    ),
    "a step of several that returns a text in its state": (
        lambda: multi_step(lambda state, batch: (give_text(), None))([0.0], [jnp.ones(2)]),
        ArgumentTypeError,
        ("multi_step called step_fn", "result[0][0]: 'old', of type str", "Return arrays"),
    ),
    "a state that holds a text": (
        lambda: multi_step(lambda state, x: (state, x))({"name": "w", "w": 0.0}, [jnp.ones(2)]),
        ArgumentTypeError,
        ("multi_step was given state", "state['name']: 'w', of type str", "Leave it out of state"),
    ),
    "a batch of several that holds a text": (
        lambda: multi_step(lambda state, x: (state, x))(0.0, [{"x": 1.0}, {"x": "row"}]),
        ArgumentTypeError,
        ("multi_step was given batches[1]['x']='row', of type str", "Pass an array"),
    ),
    "gradients that are texts": (
        lambda: accumulate_gradients(lambda w, x: (1.0, {"w": "steep"}), 2)(1.0, jnp.ones(4)),
        ArgumentTypeError,
        ("accumulate_gradients called grad_fn", "result[1]['w']: 'steep', of type str"),
    ),
    "params that hold a text": (
        lambda: accumulate_gradients(lambda w, x: w, 2)({"name": "w"}, jnp.ones(4)),
        ArgumentTypeError,
        ("accumulate_gradients was given params", "params['name']: 'w'", "Leave it out of params"),
    ),
    "a batch to cut that holds a text": (
        lambda: accumulate_gradients(lambda w, x: w, 2)(1.0, {"x": "rows"}),
        ArgumentTypeError,
        ("accumulate_gradients was given batch['x']='rows', of type str", "Pass an array"),
    ),
    "gradients that nothing returns": (
        lambda: accumulate_gradients(lambda w, x: None, 2)(1.0, jnp.ones(4)),
        ArgumentTypeError,
        ("accumulate_gradients called", "it returned None", "return statement"),
    ),
    "values of another number of rows than the weights": (
        lambda: weighted_sums({"loss": jnp.ones((4, 2))}, jnp.ones(4)),
        ShapeError,
        ("per_row['loss'] of shape [4, 2]", "weight of shape [4]", "jnp.mean"),
    ),
    "weights without rows": (
        lambda: weighted_sums({"loss": jnp.ones(())}, jnp.ones(())),
        ShapeError,
        ("per_row['loss'] of shape []", "weight of shape []"),
    ),
    "sums that are one number": (
        lambda: evaluate_sums(lambda x, mask: mask.sum()),
        ArgumentTypeError,
        ("evaluate was given sums_fn, which returned", "training.weighted_sums(per_row, mask)"),
    ),
    "a sum that is a text": (
        lambda: evaluate_sums(lambda x, mask: {"weight": mask.sum(), "x": "high"}),
        ArgumentTypeError,
        ("evaluate was given sums_fn, which returned 'high', of type str for 'x'", "weighted_sums"),
    ),
    "sums that are rows": (
        lambda: evaluate_sums(lambda x, mask: {"weight": mask.sum(), "x": x}),
        ArgumentTypeError,
        (
            "evaluate was given sums_fn, which returned array([1., 1., ",
            "for 'x'",
            "one real number",
        ),
    ),
    "sums by names that cannot be sorted": (
        lambda: evaluate_sums(lambda x, mask: {"weight": mask.sum(), 1: x.sum()}),
        ArgumentError,
        (
            (
                "training.evaluate called sums_fn, and it returned result, a dict with the keys "
                "'weight', 1: '<' not supported between instances of 'int' and 'str'"
            ),
            "JAX sorts the keys of each dict",
            "Use strings as keys",
        ),
    ),
    "values by names that cannot be sorted": (
        lambda: evaluate_sums(lambda x, mask: weighted_sums(mix_keys(x), mask)),
        ArgumentError,
        ("weighted_sums was given per_row, a dict with the keys 'loss', 1: '<'", "Use strings"),
    ),
    "a model of names that cannot be sorted": (
        lambda: evaluate(ONE, lambda model, batch, mask: {}, [{"w": 1.0, 2: 2.0}], [jnp.ones(4)]),
        ArgumentError,
        ("training.evaluate was given model[0], a dict with the keys 'w', 2: '<'", "Use strings"),
    ),
    "a batch of names that cannot be sorted": (
        lambda: evaluate(ONE, lambda model, batch, mask: {}, 1.0, [{"x": mix_keys(jnp.ones(4))}]),
        ArgumentError,
        (
            "training.evaluate: element 0 of the dataset holds batch['x'], a dict",
            "the keys 'loss', 1: '<'",
            "Use strings",
        ),
    ),
    "a sum that is complex": (
        lambda: evaluate_sums(lambda x, mask: {"weight": mask.sum(), "x": x.sum() * 1j}),
        ArgumentTypeError,
        ("evaluate was given sums_fn, which returned array(0.+4.j", "for 'x'", "one real number"),
    ),
}


def test_results_of_python_numbers_have_means() -> None:
    result: Any = accumulate_gradients(lambda w, x: {"n": 1.5, "x": x.sum()}, 2)(
        1.0, jnp.arange(4.0)
    )
    assert {name: float(value) for name, value in result.items()} == {"n": 1.5, "x": 3.0}


@pytest.mark.parametrize("name", ROWS)
def test_a_function_that_returns_something_else_is_named(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2
