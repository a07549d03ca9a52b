"""From arrays of the host to what a step takes: on the devices, or left on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import PerReplica
from jaxdist.data._pad import padded
from jaxdist.data._reading.elements import Leaf, as_array, is_numeric, on_device
from jaxdist.data._reading.host import own, own_padded
from jaxdist.data._reading.partial_batch import shares


class Placer:
    """Puts leaves where the options say.

    # [Note: who owns a batch]
    The source may overwrite an array as soon as it is asked for the next element, and NumPy
    arrays on CPU devices are not copied by JAX where they happen to be aligned, while large
    copies go on after `device_put` has returned. So on CPU the bytes are copied once into
    memory of our own, which the devices then take over as it is; on accelerators the transfer
    is waited for before the source is asked again.

    Args:
        layout: The mesh of the strategy.
        fetches: Whether leaves go on the devices.
        gives_up_memory: Whether nobody else refers to the host arrays.
    """

    def __init__(self, layout: ReplicaMesh, *, fetches: bool, gives_up_memory: bool) -> None:
        self._layout = layout
        self._fetches = fetches
        self._gives_up_memory = gives_up_memory
        self._copies = layout.platform == "cpu" or not fetches

    def split(self, leaf: Leaf, rows: int | None = None) -> Any:
        """Dim 0 of one array, filled up with zeros to `rows`, shared out over the replicas.

        Shapes:
            In: `[R*b, ...]`, or fewer rows than `rows`, which is `R*b`.
            Out: `PerReplica` of local `[b, ...]`; with one replica the array.
        """
        if isinstance(leaf, jax.Array):
            if self._fetches:
                leaf = leaf if rows is None else padded(leaf, rows)
                return self._wrapped(jax.device_put(leaf, self._sharding(leaf.ndim)), leaf.ndim)
            leaf = np.asarray(leaf)
        if rows is None or leaf.shape[0] == rows:
            return self._from_host(leaf, is_ours=self._gives_up_memory)
        filled = own_padded(leaf, on_device(leaf.dtype), rows)
        return self._from_host(filled, is_ours=True)

    def scatter(self, leaf: Leaf) -> PerReplica:
        """Dim 0 of one array, shared out over the replicas in pieces of different sizes.

        Shapes:
            In: `[B, ...]`. Out: `PerReplica` of `[ceil(B/R), ...]`, the last ones shorter, held
            one by one.
        """
        is_ours = self._gives_up_memory
        if not isinstance(leaf, jax.Array) or not self._fetches:
            leaf, is_ours = self._host(np.asarray(leaf), is_ours=is_ours)
        pieces = [leaf[rows] for rows in shares(leaf.shape[0], self._layout.num_replicas)]
        return self._held(pieces, is_ours=is_ours)

    def hold(self, pieces: Sequence[Leaf]) -> PerReplica:
        """Arrays of different shapes, one for each replica, that went through `keep`."""
        host_or_device = [
            p if isinstance(p, jax.Array) and self._fetches else _converted(np.asarray(p))
            for p in pieces
        ]
        return self._held(host_or_device, is_ours=True)

    def _held(self, pieces: Sequence[Leaf], *, is_ours: bool) -> PerReplica:
        if not self._fetches:
            return PerReplica(pieces)
        places = [self._own_place(replica) for replica in range(len(pieces))]
        placed = jax.device_put(list(pieces), places)
        if not is_ours:
            jax.block_until_ready(placed)  # See [Note: who owns a batch]
        return PerReplica(placed)

    def _own_place(self, replica: int) -> Any:
        """Where a value that one replica has alone lies."""
        if self._layout.num_logical == 1:
            return self._layout.device_grid[replica, 0]
        return NamedSharding(self._layout.replica_mesh(replica), PartitionSpec())

    def keep(self, raw: Any) -> Any:
        """An element as it is now, though its source is asked for more before it is placed."""
        if self._gives_up_memory or self._layout.num_replicas == 1:
            return raw
        return jax.tree.map(_kept, raw)

    def join(self, pieces: Sequence[Leaf]) -> Any:
        """One array for each replica, from elements that went through `keep`.

        Shapes:
            In: `R` times `[b, ...]`, or `R` scalars. Out: as `split` gives it.
        """
        if all(isinstance(p, jax.Array) for p in pieces) and self._fetches:
            return self._joined_on_devices(pieces)
        host = [np.asarray(p) for p in pieces]
        if self._layout.num_replicas == 1:
            return self._from_host(host[0], is_ours=self._gives_up_memory)
        host = [_converted(p) for p in host]
        if not self._fetches:
            return PerReplica(host)
        local = host[0].shape
        rows: list[np.ndarray] = host if local else [p.reshape(1) for p in host]
        shape = (len(rows) * rows[0].shape[0], *local[1:])

        def rows_of(index: tuple[slice, ...] | None) -> np.ndarray:
            start = index[0].start if index else None
            first = (start or 0) // max(rows[0].shape[0], 1)
            shared = self._layout.replicas_per_place
            return rows[first] if shared == 1 else np.concatenate(rows[first : first + shared])

        array = jax.make_array_from_callback(shape, self._layout.per_replica, rows_of)
        return self._wrapped(array, len(local))

    def _from_host(self, array: np.ndarray, *, is_ours: bool) -> Any:
        array, is_ours = self._host(array, is_ours=is_ours)
        if not self._fetches:
            return self._on_host(array)
        sharding = self._sharding(array.ndim)
        # Cheaper than `device_put`, which looks at the whole pytree (PERF §4).
        placed = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        if not is_ours:
            placed.block_until_ready()  # See [Note: who owns a batch]
        return self._wrapped(placed, array.ndim)

    def _host(self, array: np.ndarray, *, is_ours: bool) -> tuple[np.ndarray, bool]:
        """The array with the dtype that devices give it, and whether nobody else refers to it."""
        dtype = on_device(array.dtype)
        if dtype != array.dtype or (self._copies and not is_ours):
            return own(array, dtype), True
        return array, is_ours

    def _on_host(self, array: np.ndarray) -> Any:
        if self._layout.num_replicas == 1:
            return array
        return PerReplica(np.split(array, self._layout.num_replicas))

    def _joined_on_devices(self, pieces: Sequence[Leaf]) -> Any:
        layout, local = self._layout, pieces[0].shape
        if layout.num_replicas == 1:
            return jax.device_put(pieces[0], self._sharding(len(local)))
        shape = (layout.num_replicas * (local or (1,))[0], *local[1:])
        shards: list[jax.Array] = []
        shared = layout.replicas_per_place
        for replica in range(0, layout.num_replicas, shared):
            here = NamedSharding(layout.replica_mesh(replica), PartitionSpec())
            own = [p if local else p.reshape(1) for p in pieces[replica : replica + shared]]
            rows = own[0] if shared == 1 else jnp.concatenate(own)
            by_device = {s.device: s.data for s in jax.device_put(rows, here).addressable_shards}
            shards += [by_device[d] for d in layout.device_grid[replica]]
        array = jax.make_array_from_single_device_arrays(shape, layout.per_replica, shards)
        return self._wrapped(array, len(local))

    def _sharding(self, ndim: int) -> NamedSharding:
        return self._layout.per_replica if ndim else self._layout.replicated

    def _wrapped(self, array: jax.Array, ndim: int) -> Any:
        if self._layout.num_replicas == 1:
            return array
        shared = self._layout.replicas_per_place
        return PerReplica.of_global(array, scalars=ndim == 0, replicas_per_shard=shared)


def _converted(array: np.ndarray) -> np.ndarray:
    """The array with the dtype that devices give it."""
    dtype = on_device(array.dtype)
    return array if array.dtype == dtype else own(array, dtype)


def _kept(leaf: Any) -> Any:
    array = as_array(leaf)
    if isinstance(array, jax.Array) or not is_numeric(array.dtype):
        return leaf
    return own(array, on_device(array.dtype))
