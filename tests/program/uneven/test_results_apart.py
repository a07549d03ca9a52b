"""In uneven steps, each result of an operation with several results is judged alone.

A step computes a count that is equal on all replicas together with a sum over its rows, in one
call, loop or branch. With any numbers of rows the count is one array, and the sum a `PerReplica`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxdist
from jaxdist import PerReplica
from tests.tables import sampled

# How a count and the rows of a replica go through one operation: the new count, and a sum.
Both = tuple[Any, Any]


@jax.custom_jvp
def _with_jvp(n: Any, x: Any) -> Both:
    return n + 1.0, (x * n).sum()


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(*primals), tangents))


@jax.custom_vjp
def _with_vjp(n: Any, x: Any) -> Both:
    return n + 1.0, (x * n).sum()


_with_vjp.defvjp(lambda n, x: (_with_vjp(n, x), (n, x)), lambda res, ct: res)


def _counted(n: Any, x: Any) -> Both:
    return n + 1.0, (x * n).sum()


def _twice(step: Callable[[Any, Any], Both]) -> Callable[[Any, Any], Both]:
    def run(n: Any, x: Any) -> Both:
        n, total = step(n, x)
        more, other = step(n, x)
        return more, total + other

    return run


def _nnx_scan(n: Any, x: Any) -> Both:
    def body(carry: Any, k: Any) -> tuple[Any, None]:
        return (carry[0] + k, carry[1] + (x * k).sum()), None

    scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    carry, _ = scan((n, jnp.float32(0)), jnp.ones(3))
    return carry


OPERATIONS: dict[str, Callable[[Any, Any], Both]] = {
    "jit": jax.jit(_counted),
    "jit in jit": jax.jit(_twice(jax.jit(_counted))),
    "checkpoint": jax.checkpoint(_counted),
    "checkpoint of jit": jax.checkpoint(_twice(jax.jit(_counted))),
    "custom_jvp": _with_jvp,
    "custom_vjp": _with_vjp,
    "fori_loop": lambda n, x: lax.fori_loop(
        0, 3, lambda i, c: (c[0] + 1, c[1] + (x * i).sum()), (n, jnp.float32(0))
    ),
    "while_loop": lambda n, x: lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] + x.sum(), c[2] * 2), (n, x.sum(), n)
    )[1:][::-1],
    "while_loop with constants": lambda n, x: lax.while_loop(
        lambda c: c[0] < n * 3, lambda c: (c[0] + n, c[1] + x.sum()), (n, x.sum())
    ),
    "scan": lambda n, x: lax.scan(
        lambda c, k: ((c[0] + k, c[1] + (x * k).sum()), None), (n, x.sum()), jnp.arange(3.0)
    )[0],
    "rows of a scan": lambda n, x: jax.tree.map(
        lambda a: a[-1],
        lax.scan(lambda c, k: (c + k, (c * k, (x * c).sum())), n, jnp.arange(3.0))[1],
    ),
    "cond": lambda n, x: lax.cond(n > 0, lambda: (n + 1, x.sum()), lambda: (n - 1, -x.sum())),
    "switch": lambda n, x: lax.switch(
        jnp.int32(1), [lambda: (n, x.sum()), lambda: (n * 3, x.sum() * 2), lambda: (n, x.max())]
    ),
    "a branch in a loop": lambda n, x: lax.fori_loop(
        0,
        3,
        lambda i, c: lax.cond(
            i > 1, lambda: (c[0] + 2, c[1] * 2 + x.sum()), lambda: (c[0] * 2, c[1])
        ),
        (n, jnp.float32(0)),
    ),
    "a loop in a jit": jax.jit(
        lambda n, x: lax.fori_loop(0, 2, lambda i, c: _counted(c[0], x * c[1]), (n, x.sum()))
    ),
    "nnx.jit": lambda n, x: nnx.jit(_counted)(n, x),
    "nnx.remat": lambda n, x: nnx.remat(_counted)(n, x),
    "nnx.scan": _nnx_scan,
    "a derivative": lambda n, x: jax.value_and_grad(
        lambda n: ((n**2), (n * x).sum()), has_aux=True
    )(n)[0],
    "a derivative through a scan": lambda n, x: jax.jvp(
        lambda n: lax.scan(lambda c, k: ((c[0] * k, c[1] + x.sum()), None), (n, n), jnp.ones(2))[0],
        (n,),
        (n,),
    )[0],
    "vmap of a loop": lambda n, x: jax.tree.map(
        jnp.sum,
        jax.vmap(lambda k: lax.fori_loop(0, 2, lambda i, c: _counted(c[0], x * c[1]), (n, k)))(
            jnp.ones(2)
        ),
    ),
    "an operand that no result needs": lambda n, x: (
        jax.jit(lambda n, x: (n + 1, n * 2), keep_unused=True)(n, x)[0],
        x.sum(),
    ),
}
ROWS = {"uneven": (3, 2), "without rows": (4, 0), "three sizes": (3, 2, 1, 1)}
# The largest of no rows is an error of JAX.
NOT_RUN = {("switch", "without rows")}
TABLE = [row for row in itertools.product(OPERATIONS, ROWS) if row not in NOT_RUN]


@functools.partial(jax.jit, static_argnums=0)
def _alone(name: str, n: Any, x: Any) -> Both:
    return OPERATIONS[name](n, x)


@pytest.mark.parametrize("row", sampled(TABLE, 22, name=", ".join))
def test_an_equal_result_beside_one_of_the_rows_is_one_array(row: tuple[str, str]) -> None:
    name, kind = row
    rows = ROWS[kind]
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(len(rows))])
    parts = [np.linspace(1, 2, k, dtype=np.float32) for k in rows]
    n = np.float32(2)
    count, sums = strategy.run(OPERATIONS[name], (n, PerReplica(parts)))
    wanted = [_alone(name, n, x) for x in parts]
    assert not isinstance(count, PerReplica)
    np.testing.assert_allclose(count, wanted[0][0], rtol=1e-6)
    assert isinstance(sums, PerReplica)
    for own, (_, total) in zip(sums.values, wanted, strict=True):
        np.testing.assert_allclose(own, total, rtol=1e-6)


DIFFER: dict[str, Callable[[Any, Any], Both]] = {
    "a count of rows": jax.jit(lambda n, x: (n + x.shape[0], x.sum())),
    "a carry that reads the rows": lambda n, x: lax.fori_loop(
        0, 3, lambda i, c: (c[0] + c[1], c[1] + x.sum()), (n, jnp.float32(0))
    ),
    "a loop that ends by the rows": lambda n, x: lax.while_loop(
        lambda c: c[1] < 9, lambda c: (c[0] + 1, c[1] + 1 + x.sum()), (n, jnp.float32(0))
    ),
    "a branch by the rows": lambda n, x: lax.cond(
        x.sum() > 4, lambda: (n + 1, x.sum()), lambda: (n, x.sum())
    ),
    "as many turns as rows": lambda n, x: lax.fori_loop(
        0, x.shape[0], lambda i, c: (c[0] + 1, c[1] + x.sum()), (n, jnp.float32(0))
    ),
}


@pytest.mark.parametrize("name", DIFFER)
def test_a_result_that_depends_on_the_rows_is_that_of_each_replica(name: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = [np.linspace(1, 2, k, dtype=np.float32) for k in (3, 2)]
    counts, sums = strategy.run(DIFFER[name], (np.float32(2), PerReplica(parts)))
    wanted = [jax.jit(DIFFER[name])(np.float32(2), x) for x in parts]
    np.testing.assert_allclose(counts.values, [n for n, _ in wanted], rtol=1e-6)
    np.testing.assert_allclose(sums.values, [total for _, total in wanted], rtol=1e-6)
