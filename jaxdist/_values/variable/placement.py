"""Where the copies of a variable are placed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._values.access import VariableAggregation
from jaxdist._values.arrays import compute_auto, put
from jaxdist._values.mean import combine_pairwise, divide_parts, mean_of_shares, share_of_mean
from jaxdist._values.processes import compute_together, is_of_this_process, make_equal
from jaxdist._values.replicas.attached import mark_with_shapes
from jaxdist._values.replicas.binding import current_binding
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.replicas.placement import Kind, Placement, place_per_replica
from jaxdist._values.words import from_words, to_words, widen_integers


@dataclasses.dataclass(frozen=True)
class VariablePlacement:
    """The devices and the layout of one variable.

    Without a strategy (`layout` is None) the variable is one array on JAX's default device. With a
    strategy it is one array over the mesh: either mirrored, or `per_replica`. A per-replica
    variable has its own value on each replica, a local `[b, ...]` as global `[R*b, ...]` and a
    local scalar as global `[R]`.

    # Note [Central storage]
    With a `CentralStorageStrategy`, one copy is kept on one device (`store`), perhaps in its pinned
    host memory. `bring` copies it to the devices of the replicas when a step or a caller reads it,
    and `keep` stores one copy of what a step returns. Changes outside of a step are computed once,
    on the device that keeps the variable.
    """

    layout: ReplicaMesh | None
    sharding: NamedSharding | None
    per_replica: bool
    shape: tuple[int, ...]  # as one replica sees it
    dtype: Any

    @property
    def placement(self) -> Placement | None:
        """Kind and sharding over the mesh; None without a strategy."""
        if self.sharding is None:
            return None
        return Placement(Kind.PER_REPLICA if self.per_replica else Kind.MIRRORED, self.sharding)

    @functools.cached_property
    def store(self) -> SingleDeviceSharding | None:
        """Where the only copy is kept between its uses; None if the copies stay on the mesh."""
        on = None if self.layout is None else self.layout.variables_on
        if on is None or self.layout is None:
            return None
        # A single compute device that keeps the variables in its own memory moves nothing.
        is_used_there = on.device_set == self.layout.device_set and on == _own_memory(on)
        return None if is_used_there else on

    def bring(self, kept: jax.Array) -> jax.Array:
        """Return the array that `keep` has returned, with a copy on each device of the mesh."""
        return kept if self.store is None else jax.device_put(kept, self.sharding)

    def keep(self, array: jax.Array) -> jax.Array:
        """Return what a variable holds between its uses; see Note [Central storage]."""
        return array if self.store is None else jax.device_put(_take_one(array), self.store)

    def bring_one(self, array: jax.Array) -> jax.Array:
        """Return one copy in the memory of the device that keeps it, where changes are computed."""
        if self.store is None:
            return array
        return jax.device_put(_take_one(array), _own_memory(self.store))

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the array that holds all copies."""
        if not self.per_replica or self.layout is None:
            return self.shape
        count = self.layout.num_replicas
        return (count * self.shape[0], *self.shape[1:]) if self.shape else (count,)

    @called("a Variable")
    def copy_to_all(self, value: Any) -> jax.Array:
        """Return an array in which every copy is `value` (of the shape and dtype of a copy).

        Nobody may write to `value` later.
        """
        if self.layout is None or self.sharding is None:
            return jnp.asarray(value)
        # In a `jaxdist.function` all arrays of a program are on the same devices.
        if self.store is not None and current_binding() is None:
            return self.bring_one(jnp.asarray(value))
        if self.layout.is_shared and is_of_this_process(value):
            # Every process has made its own value.
            with jax.ensure_compile_time_eval():
                own = {"its value": jnp.asarray(value)}
            equal = make_equal(own, self.layout)
            value = equal["its value"].addressable_data(0) if equal else value
        if not self.per_replica:
            shared = self.layout.is_shared
            return (put if shared else jax.device_put)(value, self.sharding)
        # Only the copies of this process; other processes make theirs.
        value = _take_own_copy(value)
        return self._place_copies(self.layout, [value] * len(_list_copied(self.layout)))

    def _place_copies(self, layout: ReplicaMesh, values: list[Any]) -> jax.Array:
        copies = PerReplica(values)
        mark_with_shapes(copies, (self.shape,) * layout.num_replicas)
        return place_per_replica("value", copies, layout).array

    def bring_back(self, array: jax.Array) -> jax.Array:
        """Return the result of a step on the devices of the variable."""
        if self.layout is not None:
            return array
        # A variable of no strategy used in a step: keep one copy, free to be used with any device.
        return _compat.make_uncommitted(array.addressable_data(0))

    def as_per_replica(self, held: jax.Array) -> PerReplica:
        """Return the copies of a per-replica variable as a `PerReplica`."""
        shared = 1 if self.layout is None else self.layout.replicas_per_place
        return PerReplica.of_global(held, scalars=not self.shape, replicas_per_shard=shared)

    def copies(self, held: jax.Array) -> tuple[Any, ...]:
        """Return the copy of each replica of this process; moves nothing."""
        if self.layout is None:
            return (held,)
        if self.per_replica:
            return self.as_per_replica(held).values
        on = {s.device: s.data for s in held.addressable_shards}
        # Sharded over logical devices: no single device has a whole copy.
        if not held.is_fully_replicated:
            return (held,) * len(self.layout.local_replicas)
        return tuple(on[self.layout.device_grid[r, 0]] for r in self.layout.local_replicas)

    def combine(self, held: jax.Array, how: VariableAggregation) -> jax.Array:
        """Combine an array with one value for each replica into one mirrored value.

        Raises:
            DeadlineExceededError: Another process did not arrive within the limit of the mesh.
            UnavailableError: Another process has ended.
        """
        layout = self.layout
        if layout is None:
            return held
        program = _make_combine(layout, how, self.shape)
        return compute_together(
            "The read of a variable", layout, lambda: compute_auto(program, held)
        )

    def split_sum(self, value: Any) -> jax.Array:
        """Return an array with a share for each replica; the sum of the shares is `value`.

        Where an integer does not divide evenly, the first replicas get one more, so that nothing is
        lost.
        """
        layout = self.layout
        if layout is None:
            return jnp.asarray(value)
        count = layout.num_replicas
        if jnp.issubdtype(self.dtype, np.inexact):
            return self.copy_to_all(divide_parts(jnp.asarray(value), count).astype(self.dtype))
        value = _take_own_copy(value)
        wide = widen_integers(jnp.asarray(value))
        whole, rest = wide // count, wide % count
        shares = [(whole + (rest > r)).astype(self.dtype) for r in _list_copied(layout)]
        return self._place_copies(layout, shares)


def _own_memory(sharding: SingleDeviceSharding) -> SingleDeviceSharding:
    """Return the memory in which the device of a sharding computes."""
    (device,) = sharding.device_set
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


def _take_one(array: jax.Array) -> jax.Array:
    """Return one copy of an array that is whole on each of its devices."""
    return array.addressable_data(0) if len(array.sharding.device_set) > 1 else array


def _list_copied(layout: ReplicaMesh) -> Sequence[int]:
    """Return the replicas whose copies are made here: in a trace all of them, else the own ones."""
    if layout.is_shared and _compat.is_inside_trace():
        return range(layout.num_replicas)
    return layout.local_replicas


def _take_own_copy(value: Any) -> Any:
    """Return this process's copy of an array that is replicated over several."""
    is_shared = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_shared and not value.is_fully_addressable and value.is_fully_replicated:
        return value.addressable_data(0)
    return value


# Cached, since `jax.jit` of a new function would compile again at every read.
@functools.lru_cache(maxsize=64)
def _make_combine(
    layout: ReplicaMesh, how: VariableAggregation, shape: tuple[int, ...]
) -> Callable[[Any], Any]:
    def combine(held: jax.Array) -> jax.Array:
        rows = held.reshape((layout.num_replicas, *shape))
        if how is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_words(to_words(rows)[0], held.dtype)
        is_mean = how is VariableAggregation.MEAN
        if is_mean:
            rows = share_of_mean(rows, layout.num_replicas)
        # Virtual replicas need one order of additions for every number of devices.
        if layout.num_virtual is None:
            total = rows.sum(axis=0, dtype=rows.dtype)
        else:
            total = combine_pairwise(rows, jnp.add).astype(rows.dtype)
        return mean_of_shares(total, held.dtype, layout.num_replicas) if is_mean else total

    return jax.jit(combine, out_shardings=layout.replicated)
