"""Loops and evaluations refuse functions that return something else than they take, by name."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.errors import ArgumentTypeError, JaxdistError, ShapeError
from jaxdist.training import accumulate_gradients, evaluate, multi_step, run_loop, weighted_sums
from tests.strategies.oracle import refused


def sums_of_a_number() -> Any:
    """Evaluate with a function that returns one array."""
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    data = [({"x": jnp.ones(4)}, jnp.ones(4))]
    return evaluate(strategy, lambda model, batch, mask: mask.sum(), 1.0, data)


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
    "gradients that nothing returns": (
        lambda: accumulate_gradients(lambda w, x: None, 2)(1.0, jnp.ones(4)),
        ArgumentTypeError,
        ("accumulate_gradients called", "It returned None", "return statement"),
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
        sums_of_a_number,
        ArgumentTypeError,
        ("evaluate was given sums_fn, which returned", "training.weighted_sums(per_row, mask)"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_function_that_returns_something_else_is_named(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2
