"""An update of a count, a mean and a sum of squares is known in a loop, where the loop is small."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist._program.proof.moments import is_update


def add_row(moments: Any, row: Any) -> tuple[Any, None]:
    """Welford's update with one number."""
    count, mean, m2 = moments
    after = mean + (row - mean) / (count + 1)
    return (count + 1, after, m2 + (row - mean) * (row - after)), None


def is_update_of(fn: Any, *data: Any) -> bool:
    """Whether `fn(count, mean, m2, *data)` updates the three with the data."""
    closed = jax.make_jaxpr(fn)(1.0, 1.0, 1.0, *data)
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return is_update(jaxpr, jaxpr.invars[:3], jaxpr.outvars[:3], [{}], constants)


@pytest.mark.parametrize(("rows", "expected"), [(1, True), (5, True), (64, True), (65, False)])
def test_a_loop_over_few_rows_of_data_is_an_update(rows: int, expected: bool) -> None:
    def loop(count: Any, mean: Any, m2: Any, x: Any) -> Any:
        return jax.lax.scan(add_row, (count, mean, m2), x)[0]

    assert is_update_of(loop, jnp.ones(rows)) is expected


def test_a_loop_over_the_moments_themselves_is_no_update() -> None:
    def loop(count: Any, mean: Any, m2: Any) -> Any:
        return jax.lax.scan(add_row, (count, mean, m2), jnp.broadcast_to(mean, (2,)))[0]

    assert not is_update_of(loop)


def test_a_random_key_that_meets_the_moments_is_no_data() -> None:
    def of_key(count: Any, mean: Any, m2: Any, key: Any) -> Any:
        mean, key = jax.lax.optimization_barrier((mean, key))
        return add_row((count, mean, m2), jax.random.uniform(key))[0]

    assert not is_update_of(of_key, jax.random.key(0))
