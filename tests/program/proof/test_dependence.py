"""The analysis of whether a step only adds to a variable."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist._program.proof.dependence import Dependence, growth, is_weighted_sum

V = np.float32(2)
X = np.arange(4, dtype=np.float32)

GROWTH: dict[str, tuple[Dependence, Callable[[Any, Any], Any]]] = {
    "as it is": (Dependence.SAME, lambda v, x: v),
    "reshaped": (Dependence.SAME, lambda v, x: jnp.reshape(v, (1,))),
    "something added": (Dependence.SUM, lambda v, x: v + x.sum()),
    "added from the left": (Dependence.SUM, lambda v, x: x.sum() + v),
    "a constant added": (Dependence.SUM, lambda v, x: v + 4),
    "taken off": (Dependence.SUM, lambda v, x: v - x.sum()),
    "added twice": (Dependence.SUM, lambda v, x: (v + x[0]) + x[1]),
    "added under jit": (Dependence.SUM, lambda v, x: jax.jit(lambda a, b: a + b)(v, x.sum())),
    "added where a mask says": (Dependence.SUM, lambda v, x: jnp.where(x[0] > 1, v + x[1], v)),
    "added in a branch": (
        Dependence.SUM,
        lambda v, x: lax.cond(x[0] > 1, lambda: v + 1, lambda: v),
    ),
    "added in a scan": (Dependence.SUM, lambda v, x: lax.scan(lambda c, y: (c + y, None), v, x)[0]),
    "set": (Dependence.FREE, lambda v, x: x.sum()),
    "set to zero, then added to": (Dependence.FREE, lambda v, x: jnp.zeros_like(v) + x.sum()),
    "doubled": (Dependence.OTHER, lambda v, x: v + v),
    "taken from": (Dependence.OTHER, lambda v, x: x.sum() - v),
    "a running mean": (Dependence.OTHER, lambda v, x: v + (x.mean() - v) * 0.1),
    "the larger": (Dependence.OTHER, lambda v, x: jnp.maximum(v, x.max())),
    "decayed": (Dependence.OTHER, lambda v, x: 0.9 * v + x.sum()),
    "rounded": (Dependence.OTHER, lambda v, x: (v + x.sum()).astype(jnp.int32)),
    "set in one branch": (Dependence.OTHER, lambda v, x: jnp.where(x[0] > 1, v + 1, 0.0)),
    "a mask made of it": (Dependence.OTHER, lambda v, x: jnp.where(v > 1, v + 1, v)),
    "decayed in a scan": (
        Dependence.OTHER,
        lambda v, x: lax.scan(lambda c, y: (c * 0.5 + y, None), v, x)[0],
    ),
    "swapped in a scan": (
        Dependence.OTHER,
        lambda v, x: lax.scan(lambda c, y: ((c[1], c[0]), None), (v, x[0]), x)[0][0],
    ),
    "added to as bfloat16": (
        Dependence.SUM,
        lambda v, x: (v.astype(jnp.bfloat16) + x[1].astype(jnp.bfloat16)).astype(jnp.float32),
    ),
    "added behind a stopped gradient": (Dependence.SUM, lambda v, x: lax.stop_gradient(v) + x[1]),
    "in a while loop": (
        Dependence.OTHER,
        lambda v, x: lax.while_loop(lambda c: c < 9, lambda c: c + 1, v),
    ),
}


@pytest.mark.parametrize("name", list(GROWTH))
def test_what_becomes_of_a_variable(name: str) -> None:
    expected, fn = GROWTH[name]
    jaxpr = jax.make_jaxpr(fn)(V, X).jaxpr
    assert growth(jaxpr, jaxpr.invars[0], 0) is expected


def test_adding_is_told_only_where_the_values_really_add_up() -> None:
    for name, (expected, fn) in GROWTH.items():
        if expected in (Dependence.SAME, Dependence.SUM):
            assert np.all(np.asarray(fn(V + 3, X)) - np.asarray(fn(V, X)) == 3), name


_ROWS = np.array([2, 0])
WEIGHTED: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    "a running mean": (True, lambda v, x: v + (x.mean() - v) * 0.1),
    "decayed": (True, lambda v, x: 0.9 * v + x),
    "doubled": (True, lambda v, x: v + v),
    "rows added": (True, lambda v, x: v.at[_ROWS].add(x[:2])),
    "rows taken off": (True, lambda v, x: v.at[_ROWS].subtract(x[:2])),
    "itself added to rows of another": (False, lambda v, x: x.at[_ROWS].add(v[:2])),
    "rows set": (False, lambda v, x: v.at[_ROWS].set(x[:2])),
    "rows added where it says": (False, lambda v, x: x.at[v.astype(int)].add(1.0)),
    "the larger": (False, lambda v, x: jnp.maximum(v, x)),
    "set in one branch": (False, lambda v, x: jnp.where(x[0] > 1, v + 1, 0.0)),
    "its square": (False, lambda v, x: v * v + x),
    "divided by it": (False, lambda v, x: x / (1 + v)),
}


@pytest.mark.parametrize("name", list(WEIGHTED))
def test_weighted_sums_are_told_from_other_values(name: str) -> None:
    expected, fn = WEIGHTED[name]
    jaxpr = jax.make_jaxpr(fn)(X, X).jaxpr
    assert is_weighted_sum(jaxpr, 0, 0) is expected
    if expected:
        # Its change by a step from the old value is the same weight of the old value everywhere.
        once, twice = (jax.jit(fn)(X + n, X) - jax.jit(fn)(X, X) for n in (1, 2))
        np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
