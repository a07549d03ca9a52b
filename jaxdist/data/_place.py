"""Pads host arrays, and places them as a step takes them: on the devices, or still on the host.

Note [One padded size]
With `partial_batch=PAD` all batches have one shape, so a step is compiled once. The dataset gives
the batch size if it has one (`Batches`); otherwise the first batch decides. The state of an
iterator holds the number of rows (`padded_rows`). Without it a pass that is resumed just before
the short last batch would choose a smaller shape, and compile the step again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._called import called, name_call
from jaxdist._integers import find_cut_off
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import AgreedShapes, PerReplica, mark_with_shapes
from jaxdist.data._reading.elements import (
    Element,
    Leaf,
    as_array,
    copy_aligned,
    copy_padded,
    describe_array,
    device_dtype,
    format_lines,
    is_numeric,
)
from jaxdist.data._reading.partial_batch import GROUP_CALLER, SPLIT_CALLER, round_up, split_rows
from jaxdist.errors import ShapeError

# Note [Who owns a batch]
# The source may overwrite an array as soon as the next element is read. On CPU devices JAX does
# not copy a NumPy array that happens to be aligned, and on all devices a transfer continues after
# `device_put` has returned. So `Placer` copies the bytes once into aligned memory, which CPU
# devices take over without a second copy. Waiting for the transfer instead is slower on
# accelerators: on GPUs a transfer begins after the steps that were dispatched before it. Arrays of
# `Batches` are new for each batch and need no copy (`has_exclusive_arrays`). See also Note [Who
# owns host memory].

# Note [Rows of a process]
# In a job of several processes `place_own` takes the values of the local replicas only, and the
# shapes of all. The other functions take the values of all replicas: either every device belongs to
# this process, or a replica spans several processes, which then all read the same data.


class FixedRows:
    """The number of rows that all padded batches have. See Note [One padded size].

    Args:
        multiple: A divisor of the number of rows.
        rows: The least number of rows if it is known; with 0 the first batch decides.
    """

    def __init__(self, multiple: int, rows: int) -> None:
        self._caller = name_call()
        self._multiple = multiple
        self.rows = round_up(rows, multiple)

    def fit(self, elements: Sequence[Element], index: int) -> list[int]:
        """Return the number of real rows of each element; 0 for an element of scalars.

        The first call fixes `rows` if it was unknown.

        Raises:
            ShapeError: An element has more rows than batches are padded to.
        """
        counts = [element.rows or 0 for element in elements]
        largest = max(counts)
        if not self.rows:
            self.rows = round_up(largest, self._multiple)
        if largest > self.rows:
            raise self._too_large_error(elements[counts.index(largest)], largest, index)
        return counts

    def _too_large_error(self, element: Element, count: int, index: int) -> ShapeError:
        lines = [f"{n} is {describe_array(x)}" for n, x in element.named_leaves()]
        up = round_up(count, self._multiple)
        return ShapeError(
            f"{self._caller} cannot pad batch {index} of the dataset to {self.rows} rows: it has "
            f"{count}.\n{format_lines(lines)}\n\n"
            "With partial_batch=PAD all batches are padded to one number of rows, which the first "
            "one decides, so that the step is compiled once.\n\n"
            f"Give a batch of the full size first ({up} rows or more), cut the larger ones to "
            f"{self.rows} rows, or use partial_batch=UNEVEN."
        )


def pad_rows(leaf: Leaf, rows: int) -> Leaf:
    """Return `leaf` padded with rows of zeros to `rows`; the same object if it has them."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    # `jnp.pad` rejects random keys; `jnp.concatenate` accepts them.
    if isinstance(leaf, jax.Array):
        return jnp.concatenate([leaf, make_zeros(leaf, (missing, *leaf.shape[1:]))])
    return copy_padded(leaf, device_dtype(leaf.dtype), rows)


def spread_rows(leaf: Leaf, own: Sequence[slice], rows: int) -> Leaf:
    """Return the rows of all replicas, padded with zeros to `rows` for each replica.

    Shapes:
        In: `[B, ...]`, with the slice of each of `R` replicas. Out: `[R*rows, ...]`.
    """
    if all(s.stop - s.start == rows for s in own):
        return leaf
    parts = [pad_rows(leaf[s], rows) for s in own]
    return jnp.concatenate(parts) if isinstance(leaf, jax.Array) else np.concatenate(parts)


def make_zeros(like: Leaf, shape: tuple[int, ...]) -> Leaf:
    """Return zeros with the dtype and kind (NumPy or JAX) of `like`.

    For random keys these are the keys whose key data is zero.
    """
    if not isinstance(like, jax.Array):
        return np.zeros(shape, device_dtype(like.dtype))
    if not jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, like.dtype)
    bits = jax.eval_shape(jax.random.key_data, like)
    zeros = jnp.zeros((*shape, *bits.shape[like.ndim :]), bits.dtype)
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(like))


class Placer:
    """Functions that copy leaves to the devices or the host, as the options request.

    Args:
        layout: The mesh of the strategy.
        fetches: Whether to copy leaves to the devices.
        has_exclusive_arrays: Whether no other code refers to the host arrays.
        balanced: Whether the rows of a batch are divided as evenly as possible.
    """

    def __init__(
        self,
        layout: ReplicaMesh,
        *,
        fetches: bool,
        has_exclusive_arrays: bool,
        balanced: bool = False,
    ) -> None:
        self._layout = layout
        self._fetches = fetches
        self.balanced = balanced
        self.has_exclusive_arrays = has_exclusive_arrays

    def divide(self, rows: int) -> list[slice]:
        """Return the rows of a global batch that each replica takes."""
        return split_rows(rows, self._layout.num_replicas, balanced=self.balanced)

    def split(self, leaf: Leaf, rows: int | None = None) -> Any:
        """Return one array, padded with zeros to `rows` and split over the replicas along dim 0.

        Shapes:
            In: `[R*b, ...]`, or fewer rows than `rows`, which is `R*b`.
            Out: `PerReplica` of local `[b, ...]`; with one replica the array.
        """
        given = self._keep_on_device(leaf)
        padded = given if rows is None else pad_rows(given, rows)
        if isinstance(padded, jax.Array):
            return self._wrap(jax.device_put(padded, self._sharding(padded.ndim)), padded.ndim)
        # A padded array is a copy already, so it needs no second one.
        is_copy = padded is not given
        return self._put_from_host(padded, is_exclusive=is_copy or self.has_exclusive_arrays)

    @called(SPLIT_CALLER)
    def scatter(self, leaf: Leaf) -> PerReplica:
        """Return one array, split over the replicas along dim 0 into pieces of different sizes.

        Shapes:
            In: `[B, ...]`. Out: `PerReplica` of `[ceil(B/R), ...]`, the last ones shorter, with
            one array for each replica. `divide` returns the exact rows.
        """
        whole = self._keep_on_device(leaf)
        if isinstance(whole, np.ndarray):
            whole = _prepare_on_host(whole, is_exclusive=self.has_exclusive_arrays)
        pieces = [whole[rows] for rows in self.divide(whole.shape[0])]
        return self._put_each(pieces)

    @called(GROUP_CALLER)
    def place_each(self, pieces: Sequence[Leaf]) -> PerReplica:
        """Place arrays of different shapes, one for each replica, that `snapshot` returned."""
        kept = [self._keep_on_device(p) for p in pieces]
        ready = [
            _prepare_on_host(x, is_exclusive=True) if isinstance(x, np.ndarray) else x for x in kept
        ]
        return self._put_each(ready)

    def _keep_on_device(self, leaf: Leaf) -> Leaf:
        """Return a device array unchanged if batches are put on devices; else a NumPy array."""
        # A copy to the host and back would be slower.
        return leaf if isinstance(leaf, jax.Array) and self._fetches else np.asarray(leaf)

    def _put_each(self, pieces: Sequence[Leaf]) -> PerReplica:
        """Put each piece, to which no other code refers, on the devices of its replica."""
        if not self._layout.is_local:
            raise _uneven_spanning_error(pieces, self._layout)
        if not self._fetches:
            return PerReplica(pieces)
        places = [self._device_of_replica(replica) for replica in range(len(pieces))]
        # One call for all pieces, since each call of `device_put` has a fixed cost.
        return PerReplica(jax.device_put(list(pieces), places))

    def _device_of_replica(self, replica: int) -> Any:
        """Return the device, or the sharding over the logical devices, of one replica."""
        if self._layout.num_logical == 1:
            return self._layout.device_grid[replica, 0]
        return NamedSharding(self._layout.replica_mesh(replica), PartitionSpec())

    def snapshot(self, raw: Any) -> Any:
        """Return an element that the source cannot change when it reads more elements.

        See Note [Who owns a batch].
        """
        # With one replica the element is placed before the next one is read.
        if self.has_exclusive_arrays or self._layout.num_replicas == 1:
            return raw
        return jax.tree.map(_snapshot_leaf, raw)

    def join(self, pieces: Sequence[Leaf]) -> Any:
        """Return one `PerReplica` from one array for each replica, which `snapshot` returned.

        Shapes:
            In: `R` times `[b, ...]`, or `R` scalars. Out: as `split` returns it.
        """
        if all(isinstance(p, jax.Array) for p in pieces) and self._fetches:
            return self._join_on_devices(dict(enumerate(pieces)))
        host = [np.asarray(p) for p in pieces]
        if self._layout.num_replicas == 1:
            return self._put_from_host(host[0], is_exclusive=self.has_exclusive_arrays)
        host = [_prepare_on_host(p, is_exclusive=True) for p in host]
        if not self._fetches:
            return PerReplica([host[r] for r in self._layout.local_replicas])
        return self._join_from_host(dict(enumerate(host)))

    def place_own(
        self, own: Sequence[Leaf], shapes: AgreedShapes, *, is_exclusive: bool
    ) -> PerReplica:
        """Return a `PerReplica` from the arrays of the local replicas.

        See Note [Rows of a process] and Note [Agreed shapes].

        Args:
            own: One array for each local replica.
            shapes: The shape for each replica, local or not.
            is_exclusive: Whether no other code refers to the arrays.
        """
        local = self._layout.local_replicas
        is_even = len({*shapes}) == 1
        kept = [self._keep_on_device(x) for x in own]
        if is_even and self._fetches and all(isinstance(x, jax.Array) for x in kept):
            return self._join_on_devices(dict(zip(local, kept, strict=True)))
        ready: list[Leaf] = [
            _prepare_on_host(x, is_exclusive=is_exclusive) if isinstance(x, np.ndarray) else x
            for x in kept
        ]
        if is_even and self._fetches:
            by_replica = {r: np.asarray(x) for r, x in zip(local, ready, strict=True)}
            return self._join_from_host(by_replica)
        if self._fetches:
            ready = jax.device_put(ready, [self._device_of_replica(replica) for replica in local])
        value = PerReplica(ready)
        mark_with_shapes(value, shapes)
        return value

    def _join_from_host(self, own: Mapping[int, np.ndarray]) -> PerReplica:
        layout, local = self._layout, next(iter(own.values())).shape
        size = local[0] if local else 1
        shape = (layout.num_replicas * size, *local[1:])
        shared = layout.replicas_per_place

        # A callback for each shard avoids a concatenation of all replicas on the host.
        def rows_of(index: tuple[slice, ...] | None) -> np.ndarray:
            start = index[0].start if index else None
            # Shards without rows all start at 0, and are all equal.
            first = (start or 0) // size if size else next(iter(own))
            parts = [own[r] if local else own[r].reshape(1) for r in range(first, first + shared)]
            return parts[0] if shared == 1 else np.concatenate(parts)

        array = jax.make_array_from_callback(shape, layout.per_replica, rows_of)
        return self._wrap(array, len(local))

    def _put_from_host(self, array: np.ndarray, *, is_exclusive: bool) -> Any:
        array = _prepare_on_host(array, is_exclusive=is_exclusive)
        if not self._fetches:
            return self._split_on_host(array)
        sharding = self._sharding(array.ndim)
        # Cheaper than `device_put`, which handles a whole pytree.
        placed = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        return self._wrap(placed, array.ndim)

    def _split_on_host(self, array: np.ndarray) -> Any:
        if self._layout.num_replicas == 1:
            return array
        pieces = np.split(array, self._layout.num_replicas)
        return PerReplica([pieces[r] for r in self._layout.local_replicas])

    def _join_on_devices(self, pieces: Mapping[int, Leaf]) -> Any:
        layout, local = self._layout, next(iter(pieces.values())).shape
        if layout.num_replicas == 1:
            return jax.device_put(pieces[0], self._sharding(len(local)))
        shape = (layout.num_replicas * (local or (1,))[0], *local[1:])
        shards: list[jax.Array] = []
        # Each piece is copied to the devices of its replica directly, and the copies become the
        # shards of one array without another transfer.
        shared = layout.replicas_per_place
        for replica in layout.local_replicas[::shared]:
            here = NamedSharding(layout.replica_mesh(replica), PartitionSpec())
            of_shard = [pieces[r] for r in range(replica, replica + shared)]
            own = [p if local else p.reshape(1) for p in of_shard]
            rows = own[0] if shared == 1 else jnp.concatenate(own)
            by_device = {s.device: s.data for s in jax.device_put(rows, here).addressable_shards}
            shards += [by_device[d] for d in layout.device_grid[replica] if d in by_device]
        array = jax.make_array_from_single_device_arrays(shape, layout.per_replica, shards)
        return self._wrap(array, len(local))

    def _sharding(self, ndim: int) -> NamedSharding:
        return self._layout.per_replica if ndim else self._layout.replicated

    def _wrap(self, array: jax.Array, ndim: int) -> Any:
        if self._layout.num_replicas == 1:
            return array
        shared = self._layout.replicas_per_place
        return PerReplica.of_global(array, scalars=ndim == 0, replicas_per_shard=shared)


def _uneven_spanning_error(pieces: Sequence[Leaf], layout: ReplicaMesh) -> ShapeError:
    processes = sorted({*layout.device_owners.values()})
    return ShapeError(
        f"{name_call()} cannot give replicas whose devices belong to several of the processes "
        f"{processes} arrays of different shapes: {[p.shape for p in pieces]}.\n\n"
        "Replicas that span several processes take arrays of one shape in one step.\n\n"
        "Use partial_batch=PAD, which adds rows of zeros and a mask, or DROP."
    )


def _prepare_on_host(array: np.ndarray, *, is_exclusive: bool) -> np.ndarray:
    """Return the array in its dtype on devices, as a copy if other code may refer to it."""
    dtype = device_dtype(array.dtype)
    is_ready = is_exclusive and dtype == array.dtype
    return array if is_ready else copy_aligned(array, dtype)


def _snapshot_leaf(leaf: Any) -> Any:
    array = as_array(leaf)
    # JAX arrays never change. `ElementReader` raises for leaves that are not numeric, and needs
    # the leaf itself for the message.
    if isinstance(array, jax.Array) or not is_numeric(array.dtype):
        return leaf
    # `ElementReader` raises for integers that JAX would cut off, so they keep their dtype here.
    is_kept = find_cut_off(array) is not None
    return copy_aligned(array, array.dtype if is_kept else device_dtype(array.dtype))
