"""An update refuses a state or gradients that it was not made for, by name."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdist
from jaxdist import PerReplica, shard_state, sharded_update
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from tests.strategies.oracle import refused

PARAMS = {"w": jnp.ones((4, 3))}
ROWS = PerReplica([1.0, 2.0])


def two() -> jaxdist.MirroredStrategy:
    """Two replicas."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def update(strategy: jaxdist.Strategy, tx: Any, state: Any, params: Any = PARAMS) -> Any:
    """Update once, with the parameters as gradients."""

    def step(state: Any, params: Any, x: Any) -> Any:
        return tx.update(jax.tree.map(lambda p: p * x, params), state, params)

    rows = PerReplica([1.0] * strategy.num_replicas_in_sync)
    return strategy.run(step, (state, params, rows))


@pytest.mark.parametrize("count", [1, 2])
def test_the_state_of_another_transformation_is_named_with_both_structures(count: int) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    tx = sharded_update(optax.adam(0.1))
    parts = "was given a state with the structure", "the transformation makes", "tx.init(params)"
    with refused(ArgumentError, *parts):
        update(strategy, tx, optax.sgd(0.1).init(PARAMS))


def test_the_state_of_each_replica_is_not_cut() -> None:
    state = {"count": jnp.zeros(()), "mu": [ROWS]}
    with refused(ArgumentTypeError, "shard_state was given state['mu'][0]=", "strategy.reduce"):
        shard_state(state, two())


def test_pieces_of_another_shape_are_named_with_both_numbers() -> None:
    strategy = two()
    tx = sharded_update(optax.adam(0.1), min_bytes=0)
    state = shard_state(tx.init(PARAMS), strategy, min_bytes=0)

    def step(state: Any, params: Any, x: Any) -> Any:
        # The nodes stay, and say that the pieces are as before.
        longer = jax.tree.map(lambda leaf: jnp.tile(leaf, (2,) * jnp.ndim(leaf)), state)
        return tx.update(jax.tree.map(lambda p: p * x, params), longer, params)

    parts = "array(s) are not what their nodes say", "in a node cut along dim", "of 4 elements"
    with refused(ShapeError, *parts):
        strategy.run(step, (state, PARAMS, ROWS))


def test_an_error_of_the_transformation_is_passed_on_by_one_replica() -> None:
    def fail(updates: Any, state: Any, params: Any = None) -> Any:
        raise ValueError("an error of the transformation")

    tx = sharded_update(optax.GradientTransformation(lambda params: (), fail))
    with pytest.raises(ValueError, match="an error of the transformation"):
        update(jaxdist.OneDeviceStrategy("cpu:0"), tx, ())
