"""Replicas that hold copies of one piece (HSDP) declare the same values, or an error says so."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Sharded, partition
from jaxdist.errors import ShardedArrayError

W = np.arange(1.0, 5.0, dtype=np.float32)
ROWS = [np.full(3, i + 1.0, np.float32) for i in range(4)]


def _strategy() -> jaxdist.MirroredStrategy:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("a", "b"))


def _loss(whole: jax.Array, x: jax.Array) -> jax.Array:
    return (whole**2).sum() * x.sum()


def _gather(piece: jax.Array) -> jax.Array:
    return jax.lax.all_gather(piece, "b", tiled=True)


def _declare(piece: jax.Array) -> Sharded:
    return Sharded(piece, 0, 4, axes=("b",))


def _subtract(w: Sharded, g: Any) -> Any:
    return jax.tree.map(jnp.subtract, w, g)


DIFFER: dict[str, Callable[[Sharded, jax.Array], Any]] = {
    "rows": lambda w, x: _declare(w.array * x.sum()),
    "rows, reduced over the axis of the pieces": lambda w, x: _declare(
        w.array * jax.lax.psum(x.sum(), "b")
    ),
    "a gradient of the piece": lambda w, x: _declare(
        jax.grad(lambda p: _loss(_gather(p), x))(w.array)
    ),
    "an update by it": lambda w, x: _subtract(
        w, _declare(jax.grad(lambda p: _loss(_gather(p), x))(w.array))
    ),
    "a gradient through the node": lambda w, x: _subtract(
        w, jax.grad(lambda w: _loss(_gather(w.array), x))(w)
    ),
    "a loss of the piece alone": lambda w, x: jax.grad(lambda w: _loss(w.array, x))(w),
    "in a branch": lambda w, x: _declare(
        jax.lax.cond(x.sum() > 5, lambda p: 2 * p, lambda p: p, w.array)
    ),
    "in a loop": lambda w, x: _declare(jax.lax.fori_loop(0, 2, lambda i, p: p + x.sum(), w.array)),
}


# Op by op, the replicas' pieces themselves show that a branch has made them different.
SAYS = r"over \['a'\] too(.|\n)*pmean\(piece, 'a'\)|not proved to be pieces of one array"


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op_by_op"])
@pytest.mark.parametrize("what", DIFFER)
def test_copies_of_a_piece_that_may_differ_are_refused(what: str, eagerly: bool) -> None:
    strategy = _strategy()
    held = partition.place(strategy, {"w": W}, partition.fsdp(min_bytes=0, axes=("b",)))["w"]
    with (
        jaxdist.config.run_eagerly(eagerly),
        pytest.raises(ShardedArrayError, match=SAYS),
    ):
        strategy.run(DIFFER[what], (held, PerReplica(ROWS)))


def _mean_gradient() -> np.ndarray:
    return 2 * W * np.mean([x.sum() for x in ROWS], dtype=np.float32)


def _scattered(w: Sharded, x: jax.Array) -> Sharded:
    gradient = jax.grad(lambda p: _loss(_gather(p), x))(w.array)
    # The transpose of the gather has summed over the axis of the pieces.
    return _declare(jax.lax.pmean(gradient, "a") / 2)


EQUAL: dict[str, Callable[[Sharded, jax.Array], Any]] = {
    "a gradient of the array": lambda w, x: jax.grad(lambda w: _loss(w[...], x))(w),
    "reduced by hand": _scattered,
    "assumed": lambda w, x: _declare(
        jaxdist.assume_replicated(jax.lax.pmean(x.sum(), ("a", "b"))) * 2 * w.array
    ),
}


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op_by_op"])
@pytest.mark.parametrize("what", EQUAL)
def test_copies_that_are_equal_are_the_array_on_every_device(what: str, eagerly: bool) -> None:
    strategy = _strategy()
    held = partition.place(strategy, {"w": W}, partition.fsdp(min_bytes=0, axes=("b",)))["w"]
    with jaxdist.config.run_eagerly(eagerly):
        found = strategy.run(EQUAL[what], (held, PerReplica(ROWS)))
    for shard in found.array.addressable_shards:
        np.testing.assert_allclose(shard.data, _mean_gradient()[shard.index], rtol=1e-6)
