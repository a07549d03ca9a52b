"""Checks that the replicas still hold bit-equal copies of mirrored state."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jaxdist._called import called, refuse
from jaxdist._checks.result_comparison import is_argument_leaf, is_per_replica
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values import Kind, placement_of_sharding, view_auto
from jaxdist.errors import ReplicaDriftError


class DriftChecks:
    """Compares checksums across the replicas of one strategy, at every n-th call."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout
        self._calls: Counter[Any] = Counter()

    @called("check_replicas")
    def check(self, state: PyTree, every: int) -> bool:
        """Compare the state at every `every`-th call; return whether anything was compared."""
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise refuse(
                f"every={every!r}.",
                "every is the number of calls from one comparison to the next: an integer from 1 "
                "up.",
                "Pass for instance every=100.",
            )
        plain = jax.tree.map(_extract_arrays, state, is_leaf=is_argument_leaf)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(plain, is_leaf=is_per_replica)
        # Calls are counted per structure: a program may check a model and an optimizer in turn.
        self._calls[treedef] += 1
        # The first call compares too, so that different initial values are found immediately.
        if (self._calls[treedef] - 1) % every:
            return False
        mirrored = [(p, x) for p, x in leaves if self._is_mirrored(x)]
        if self._layout.num_places == 1 or not mirrored:
            return False
        sums = _compute_checksums(tuple(view_auto(x) for _, x in mirrored), self._layout)
        table = np.asarray(sums).reshape(self._layout.num_places, len(mirrored), 2)
        differs = (table != table[0]).any(axis=-1)
        drifted = {
            keystr(path): np.flatnonzero(of_array).tolist()
            for (path, _), of_array in zip(mirrored, differs.T, strict=True)
            if of_array.any()
        }
        if drifted:
            raise ReplicaDriftError(_format_drift(drifted, len(mirrored)))
        return True

    def _is_mirrored(self, leaf: Any) -> bool:
        # The checksums are copied to this host, so all shards must be in this process.
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return False
        if leaf.is_deleted() or not leaf.size:
            return False
        placed = placement_of_sharding(leaf.sharding, leaf.ndim, self._layout)
        return placed is not None and placed.kind is Kind.MIRRORED and leaf.is_fully_replicated


def _extract_arrays(x: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(x)) if isinstance(x, nnx.Pytree) else x


@functools.partial(jax.jit, static_argnums=(1,))
def _compute_checksums(arrays: tuple[jax.Array, ...], layout: ReplicaMesh) -> jax.Array:
    """Return two 32-bit sums of each replica's own copy of every array: `[R * n, 2]`."""

    def replica(*local: jax.Array) -> jax.Array:
        return jnp.stack([_compute_checksum(x) for x in local])

    # The specs claim that the arrays are replicated, which is what this function checks. With
    # `check_vma=False` JAX does not verify the claim, and each device reads its own copy.
    return jax.shard_map(
        replica,
        mesh=layout.auto_mesh,
        in_specs=(PartitionSpec(),) * len(arrays),
        out_specs=layout.replica_spec,
        axis_names=frozenset(layout.mesh.axis_names),
        check_vma=False,
    )(*arrays)


def _compute_checksum(x: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    words = jax.lax.bitcast_convert_type(x.ravel(), jnp.uint8).ravel().astype(jnp.uint32)
    place = jnp.arange(words.size, dtype=jnp.uint32)
    # The second sum depends on the order, so two swapped elements change it.
    weighted = words * (place * jnp.uint32(2654435761) + jnp.uint32(1))
    return jnp.stack([words.sum(dtype=jnp.uint32), weighted.sum(dtype=jnp.uint32)])


def _format_drift(drifted: dict[str, list[int]], count: int) -> str:
    rows = [f"state{name}: replicas {who} differ from replica 0" for name, who in drifted.items()]
    more = f"\nand {len(rows) - 10} more" if len(rows) > 10 else ""
    return (
        f"check_replicas found {len(drifted)} of {count} mirrored arrays that are not the same on "
        "all replicas.\n" + "\n".join(rows[:10]) + more + "\n\n"
        "Mirrored state must be bit-equal, or the replicas train different models.\n\n"
        "Look for a wrong jaxdist.assume_replicated, or a device that does not compute "
        "deterministically; go back to the last checkpoint."
    )
