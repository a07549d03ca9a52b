"""Results of virtual replicas yield their dtype to others where those of `jax.jit` do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist import MirroredStrategy, get_replica_context
from tests.program.virtual.test_deterministic import virtual

ROWS: dict[str, Callable[[Any], Any]] = {
    "unchanged": lambda v: v,
    "sum": lambda v: v + 1,
    "where": lambda v: jnp.where(v > 0, v, 2.0),
    "loop": lambda v: lax.fori_loop(0, 3, lambda _, c: c + 1, v),
    "branch": lambda v: lax.cond(v > 0, lambda: v, lambda: v * 2),
    "scan": lambda v: lax.scan(lambda c, _: (c * 2, c), v, None, length=3)[1],
    "slope": jax.grad(lambda v: v * v),
    "inner jit": jax.jit(lambda v: v * 2),
    "strong": lambda v: v * jnp.float32(2),
    "integer": lambda v: jnp.where(v > 0, 1, 2),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_a_result_is_as_weak_as_that_of_jit(name: str, devices: int) -> None:
    of = ROWS[name]
    expected = jax.jit(of)(1.5)
    found = virtual(devices, 2).run(lambda v: of(v), (1.5,))
    assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)

    def own(v: Any) -> Any:
        return of(v) * get_replica_context().replica_id_in_sync_group

    expected = jax.jit(lambda v: of(v) * jnp.int32(1))(1.5)
    for value in virtual(devices, 2).run(own, (1.5,)).values:
        assert (value.dtype, value.weak_type) == (expected.dtype, expected.weak_type)


def test_weights_in_bfloat16_keep_their_dtype_beside_a_rate_in_the_state() -> None:
    def step(weights: Any, rate: Any) -> Any:
        return weights - rate * weights, rate * 0.5

    trained = []
    for strategy in virtual(2), MirroredStrategy(["cpu:0", "cpu:1"]):
        state: Any = (jnp.ones(4, jnp.bfloat16), 0.25)
        for _ in range(3):
            state = strategy.run(step, state)
        trained.append(state)
    assert trained[0][0].dtype == trained[1][0].dtype == jnp.bfloat16
    assert trained[0][0].tolist() == trained[1][0].tolist()
