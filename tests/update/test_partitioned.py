"""A program of whole arrays gives on pieces what it gives on whole arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdist
from jaxdist import Sharded

COUNT = 3
Program = Callable[[Any, Any], Any]

# Each takes two arrays [4, 7] of which three replicas have a piece (dim 1, padded to 9).
ON_PIECES: dict[str, Program] = {
    "elementwise": lambda x, y: jnp.where(x > 0, jnp.tanh(x) * y + 1.5, lax.rsqrt(y * y + 2)),
    "with a scalar": lambda x, y: x * jnp.float32(3) - 2 * y,
    "clipped": lambda x, y: jnp.clip(x, -0.5, 0.5) + lax.integer_pow(y, 3),
    "another dtype": lambda x, y: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32) + y,
    "transposed": lambda x, y: (x.T * y.T).T,
    "reshaped around the cut": lambda x, y: (x.reshape(2, 2, 7) * 2).reshape(4, 7) + y,
    "a function inside": lambda x, y: jax.jit(jnp.logaddexp)(x, y),
    "broadcast along the cut": lambda x, y: x + jnp.arange(7.0)[None] * jnp.ones((4, 1)),
    "zeros and ones": lambda x, y: jnp.zeros_like(x) + jnp.ones_like(y),
    "checkpointed": lambda x, y: jax.checkpoint(jnp.sin)(x) * y,
}
REDUCED: dict[str, Program] = {
    "sum": lambda x, y: x * jnp.sum(y),
    "sum of a dim that is whole": lambda x, y: x - jnp.sum(y, axis=0, keepdims=True),
    "sum of the dim that is cut": lambda x, y: x - jnp.sum(y, axis=1, keepdims=True),
    "largest": lambda x, y: x / jnp.max(jnp.abs(y)),
    "smallest, of dims": lambda x, y: x - jnp.min(y - 9, axis=1, keepdims=True),
    "all": lambda x, y: jnp.where(jnp.all(jnp.isfinite(1 / (y * y + 1))), x, y),
    "any": lambda x, y: jnp.where(jnp.any(y > 5), x, y),
    "norm of a tree": lambda x, y: x / optax.tree.norm({"x": x, "y": y}),
    "inner product": lambda x, y: x * jnp.einsum("ij,ij->", x, y),
    "integers": lambda x, y: x * jnp.sum((y > 0).astype(jnp.int32)),
}
GATHERED: dict[str, Program] = {
    "matrix product": lambda x, y: (x @ y.T) @ x,
    "sorted": lambda x, y: jnp.sort(x, axis=1) + y,
    "cumulated": lambda x, y: jnp.cumsum(x, axis=1) * y,
    "raveled": lambda x, y: jnp.concatenate([x.ravel(), y.ravel()])[:28].reshape(4, 7),
    "looped": lambda x, y: lax.fori_loop(0, 3, lambda i, z: z * 0.5 + y, x),
    "scanned": lambda x, y: lax.scan(lambda c, r: (c + r, c), x[0], y)[1],
    "of products": lambda x, y: x * jnp.prod(y),
    "decomposed": lambda x, y: jnp.linalg.qr(x.T)[0].T * y,
    "random": lambda x, y: x + jax.random.normal(jax.random.key(0), x.shape),
}
BRANCHED: dict[str, Program] = {
    "one way": lambda x, y: lax.cond(jnp.sum(x) > -1e9, lambda a: a * 2, lambda a: a + 1, x) + y,
    "with a norm in it": lambda x, y: lax.cond(
        jnp.all(jnp.isfinite(x)), lambda a, b: a / optax.tree.norm(b), lambda a, b: b, x, y
    ),
    "to whole arrays": lambda x, y: (
        x * lax.cond(x.sum() > 0, lambda a: jnp.sort(a.ravel())[:3].sum(), lambda a: a.max(), x)
    ),
}
PROGRAMS = {**ON_PIECES, **REDUCED, **GATHERED, **BRANCHED}


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(4, 7)).astype("float32"),
        rng.normal(size=(4, 7)).astype("float32"),
    )


def as_transformation(program: Program) -> optax.GradientTransformation:
    """An update of a gradient with a state; the result is the update, and is in the state."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        made = program(updates, state)
        return made, made - state

    return optax.GradientTransformation(lambda params: params, update)


@pytest.fixture(scope="module")
def strategy() -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(COUNT)])


def test_result_is_that_of_whole_arrays(strategy: jaxdist.MirroredStrategy) -> None:
    x, y = operands()
    txs = {
        n: jaxdist.sharded_update(as_transformation(p), min_bytes=0, reduce_op="sum")
        for n, p in PROGRAMS.items()
    }
    with strategy.scope():
        states = {n: tx.init(y) for n, tx in txs.items()}

    def step(states: Any) -> Any:
        return {n: tx.update(x / COUNT, states[n]) for n, tx in txs.items()}

    found = strategy.run(step, (states,))
    for name, program in PROGRAMS.items():
        wanted = program(jnp.asarray(x), jnp.asarray(y))
        updates, state = found[name]
        np.testing.assert_allclose(updates, wanted, rtol=2e-5, atol=2e-5, err_msg=name)
        assert isinstance(state, Sharded)
        np.testing.assert_allclose(state.whole(), wanted - y, rtol=2e-5, atol=2e-5, err_msg=name)


def _gathers(strategy: jaxdist.MirroredStrategy, program: Program) -> list[str]:
    tx = jaxdist.sharded_update(as_transformation(program), min_bytes=0)
    x, y = operands()
    with strategy.scope():
        state = tx.init(y)
    asked = strategy.lower(tx.update, (x, state)).traced_collectives
    return sorted(c.kind for c in asked)


@pytest.mark.parametrize("name", sorted(set(ON_PIECES) - {"zeros and ones"}))
def test_what_is_elementwise_needs_no_other_collective(
    strategy: jaxdist.MirroredStrategy, name: str
) -> None:
    # The gradient on its way in, the update on its way out.
    assert _gathers(strategy, PROGRAMS[name]) == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("name", ["sum", "norm of a tree", "inner product"])
def test_sum_over_a_tree_is_one_scalar_all_reduce(
    strategy: jaxdist.MirroredStrategy, name: str
) -> None:
    tx = jaxdist.sharded_update(as_transformation(PROGRAMS[name]), min_bytes=0)
    x, y = operands()
    with strategy.scope():
        state = tx.init(y)
    asked = strategy.lower(tx.update, (x, state)).traced_collectives
    [psum] = [c for c in asked if c.kind == "psum"]
    assert psum.bytes_per_device == 4
    assert [c.kind for c in asked if c.kind == "all_gather"] == ["all_gather"]


def test_padding_that_is_not_a_number_stays_out_of_sums(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    program = REDUCED["norm of a tree"]
    tx = jaxdist.sharded_update(as_transformation(program), min_bytes=0)
    x, y = operands()
    padded = Sharded(np.pad(y, ((0, 0), (0, 2)), constant_values=np.nan), dim=1, size=7)
    found, _ = strategy.run(tx.update, (x, padded))
    np.testing.assert_allclose(found, program(jnp.asarray(x), jnp.asarray(y)), rtol=1e-5)
