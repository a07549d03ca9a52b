"""`PerReplica`: one value for each replica; and the base class of all distributed values."""

import copy
import enum
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from jaxdist import _compat
from jaxdist._called import called, refuse, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_flag, as_integer, show
from jaxdist._values.arrays import copy_if_writable, make_deleted_error
from jaxdist._values.items import Instead, NoItemAssignment
from jaxdist.errors import ArgumentTypeError, ReplicaValueError


class DistributedValues(NoItemAssignment):
    """A value on the replicas of a strategy.

    Users do not create one directly: `Strategy.run` and datasets return `PerReplica`.

    Example:
        >>> isinstance(PerReplica([1, 2]), DistributedValues)
        True

    Source:
        `tf.distribute.DistributedValues`.
    """

    __slots__ = ()


class Form(enum.Enum):
    """How a `PerReplica` stores its values."""

    ROWS = "rows"  # one global array: a local [b, ...] is global [R*b, ...]
    SCALARS = "scalars"  # one global array [R]: each replica has a scalar
    LOCAL = "local"  # one by one: values that are not placed yet, or have different shapes


# The form, and the number of replicas whose values share one device.
Storage: TypeAlias = tuple[Form, int]
_ONE_BY_ONE: Storage = (Form.LOCAL, 1)


class PerReplica(DistributedValues):
    """One value for each replica; `Strategy.run` returns it for results that differ.

    A registered pytree node. On the devices it is one global `jax.Array`. Each shard *is* a local
    value, so nothing is copied.

    Shapes:
        A local value `[b, ...]` on each of `R` replicas is the global array `[R*b, ...]`, sharded
        over the replica axes on dim 0. A local scalar is global `[R]`. Values of different shapes
        are stored one by one.

    Cost:
        NumPy arrays among the values are copied on the host, so that the caller may overwrite
        them. Otherwise construction is free; `Strategy.run` copies each value to its replica. No
        collective runs.

    Args:
        values: One value for each replica, in replica order.

    Raises:
        ReplicaValueError: `values` is empty.
        ArgumentTypeError: `values` is not a sequence.

    Example:
        >>> strategy = MirroredStrategy()
        >>> x = PerReplica(range(8))
        >>> strategy.run(lambda v: v * v, (x,))
        PerReplica(0, 1, 4, 9, 16, 25, 36, 49)

    Source:
        `PerReplica` of `tf.distribute`.
    """

    # `_flat` has the children and the form exactly as JAX's flatten returns them. JAX then reads
    # the attribute in C, which saves half a microsecond in each step that takes a value.
    # Datasets set `_ahead` and `_agreed`; see Note [Batches to come] and Note [Agreed shapes].
    __slots__ = ("_agreed", "_ahead", "_flat")

    _instead = Instead(
        "Its values are arrays of JAX, whose elements do not change.",
        "Make another one in a step: strategy.run(lambda x: x.at[index].set(new), (values,)).",
    )

    _flat: "tuple[tuple[Any, ...], Storage]"
    _ahead: Any
    _agreed: Any

    @called("PerReplica")
    def __init__(self, values: Iterable[Any]) -> None:
        # A mapping or string is iterable, too, but its elements are not values of replicas.
        is_many = isinstance(values, Iterable) and getattr(values, "ndim", 1) != 0
        if isinstance(values, (str, bytes, dict, set, PerReplica)) or not is_many:
            raise refuse_type(
                f"values={show(values)}.",
                "values is a sequence with one value for each replica.",
                "Pass for instance PerReplica([1.0, 2.0]). To split one array over the replicas, "
                "call jax.device_put(x, strategy.per_replica_sharding).",
            )
        held = tuple(values)
        if not held:
            raise refuse(
                f"values={show(values)}, which is empty.",
                "values has one value for each replica, in replica order.",
                "Pass for instance PerReplica([1.0, 2.0]) for two replicas.",
                kind=ReplicaValueError,
            )
        if any(map(_compat.is_mutable, held)):
            raise refuse_type(
                f"values={show(values)}, with a jax.Ref.",
                "A PerReplica holds values, and a jax.Ref can change.",
                "Pass its value, ref[...]; for state that steps change use jaxdist.Variable.",
            )
        self._flat = (tuple(map(_take_snapshot, held)), _ONE_BY_ONE)

    @classmethod
    @called("PerReplica.of_global")
    def of_global(
        cls, array: Any, *, scalars: bool = False, replicas_per_shard: int = 1
    ) -> "PerReplica":
        """Wrap a global array that is sharded over the replicas on dim 0; nothing is copied.

        Shapes:
            In: global `[R*b, ...]`, or `[R]` with `scalars=True`.

        Cost:
            None; a NumPy array is copied on the host.

        Args:
            array: The global array.
            scalars: Whether each replica's value is a scalar.
            replicas_per_shard: Number of replicas whose values share one device, in order on
                dim 0. More than one under a strategy with `deterministic=True`.

        Raises:
            ArgumentTypeError: `array` is not an array, `scalars` is not a bool, or
                `replicas_per_shard` is not an integer.
            ArgumentError: `replicas_per_shard` is below 1.
            ReplicaValueError: `replicas_per_shard` does not divide the rows.

        Example:
            >>> strategy = MirroredStrategy()
            >>> x = jax.device_put(np.arange(16.0), strategy.per_replica_sharding)
            >>> PerReplica.of_global(x).values[1].tolist()
            [2.0, 3.0]
        """
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise refuse_type(
                f"array={show(array)}.",
                "array is one global array with the rows of all replicas.",
                "Pass jax.device_put(x, strategy.per_replica_sharding), or PerReplica([...]) with "
                "one value for each replica.",
            )
        scalars = as_flag("scalars", scalars)
        as_integer("replicas_per_shard", replicas_per_shard, least=1)
        num_rows = array.shape[0] if array.shape else 0
        if num_rows % replicas_per_shard or replicas_per_shard > max(num_rows, MAX_PER_SHARD):
            # Some examples, not all divisors.
            fitting = [n for n in (1, 2, 4, 8, 16) if num_rows % n == 0]
            raise refuse(
                f"replicas_per_shard={replicas_per_shard} and an array of {num_rows} rows, "
                f"{array.dtype}{[*array.shape]}.",
                "The rows are split over the shards, and those of a shard over its replicas, so "
                "replicas_per_shard divides their number.",
                f"Pass {' or '.join(map(str, fitting))}, or leave it out.",
                kind=ReplicaValueError,
            )
        held = copy_if_writable(array)
        return hold_global(held, scalars=scalars, replicas_per_shard=replicas_per_shard)

    @property
    def _data(self) -> Any:
        children, (form, _) = self._flat
        return children if form is Form.LOCAL else children[0]

    @property
    def _form(self) -> Form:
        return self._flat[1][0]

    @property
    def is_global(self) -> bool:
        """Whether the values are stored as one global array."""
        return self._form is not Form.LOCAL

    @property
    def form(self) -> Form:
        """How the values are stored."""
        return self._form

    @property
    def array(self) -> jax.Array:
        """The global array `[R*b, ...]` (`[R]` for scalars), sharded over the replicas.

        Raises:
            ReplicaValueError: The values are stored one by one, so no such array exists.

        Example:
            >>> MirroredStrategy().run(lambda: get_replica_context()
            ...     .replica_id_in_sync_group).array.shape
            (8,)
        """
        if self._form is Form.LOCAL:
            raise ReplicaValueError(
                f"PerReplica.array was read, and the values are not one array: {self!r}.\n\n"
                "Values that are not on devices yet, or have different shapes, are stored one by "
                "one.\n\nUse .values, or strategy.gather(value, axis=0)."
            )
        return self._data

    @property
    @_compat.outside_of_meshes
    @called("PerReplica.values was read, and the array that PerReplica.of_global")
    def values(self) -> tuple[Any, ...]:
        """The local values of this process's replicas, in replica order.

        Cost:
            None for arrays of rank 1 and up, which are the shards themselves. Scalars, and values
            that share a shard, are sliced out. No collective.

        Example:
            >>> PerReplica([3, 4]).values
            (3, 4)
        """
        if self._form is Form.LOCAL:
            return self._data
        if isinstance(self._data, jax.core.Tracer) or not isinstance(self._data, jax.Array):
            raise refuse(
                f"is a {type(self._data).__name__}, which is on no devices.",
                "The devices of the rows decide which replica they belong to.",
                "Pass it to strategy.run, strategy.reduce or strategy.gather, which know.",
                kind=ReplicaValueError,
            )
        if self._data.is_deleted():
            raise make_deleted_error("PerReplica.values was read", self._data)
        shards = shards_by_replica(self._data)
        if self._form is Form.SCALARS:
            # Iterating over a shard slices it on the device; a single scalar needs only a reshape.
            return tuple(row for s in shards for row in (s if s.size > 1 else (s.reshape(()),)))
        count = self._flat[1][1]
        if count == 1:
            return shards
        rows = shards[0].shape[0] // count
        return tuple(s[i * rows : (i + 1) * rows] for s in shards for i in range(count))

    def __reduce__(self) -> Any:
        # JAX writes an array without its sharding, which decides whose value each row is. So the
        # values are written one by one.
        others = {
            name: getattr(self, name) for name in ("_agreed", "_ahead") if hasattr(self, name)
        }
        if self._form is Form.LOCAL or isinstance(self._data, jax.Array):
            return PerReplica, (self.values,), (None, others)
        return object.__new__, (PerReplica,), (None, {**others, "_flat": self._flat})

    def __copy__(self) -> "PerReplica":
        return self._with_children(self._flat[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> "PerReplica":
        # JAX would not split the copy of an array without elements.
        kept = self.is_global and not self._data.size
        return self._with_children(self._flat[0] if kept else copy.deepcopy(self._flat[0], memo))

    def _with_children(self, children: tuple[Any, ...]) -> "PerReplica":
        made: PerReplica = object.__new__(type(self))
        for name in ("_agreed", "_ahead"):
            if hasattr(self, name):
                setattr(made, name, getattr(self, name))
        made._flat = (children, self._flat[1])
        return made

    def __repr__(self) -> str:
        # The repr must never fail: error messages and debuggers print tracers and donated arrays.
        data = self._data
        if self._form is not Form.LOCAL:
            if not isinstance(data, jax.Array) or isinstance(data, jax.core.Tracer):
                return f"PerReplica({self._form.value} of {data!r})"
            if data.is_deleted():
                shape = [*data.shape]
                return f"PerReplica({self._form.value} of a deleted {data.dtype}{shape})"
        if self._form is Form.LOCAL or self._form is Form.SCALARS or data.size <= 64:
            # Inside a trace the slices would be staged, and no numbers could be printed.
            with jax.ensure_compile_time_eval():
                return "PerReplica(" + ", ".join(map(_format_value, self.values)) + ")"
        shape = [*self.values[0].shape]
        return f"PerReplica({len(self.values)} local values of {data.dtype}{shape})"

    def _refuse_arithmetic(self, *_: Any) -> Any:
        raise ArgumentTypeError(
            "An operator was used on a PerReplica outside a replica.\n\n"
            "A PerReplica holds one value for each replica, so arithmetic on it has no single "
            "result.\n\n"
            "Do it inside strategy.run(fn, args=(value,)), or get one value with "
            "strategy.reduce('SUM', value, axis=None) or strategy.gather(value, axis=0)."
        )

    # Also `__array__`: without it, NumPy would silently make an object array of the value.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_arithmetic
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse_arithmetic
    __pow__ = __float__ = __int__ = __getitem__ = __bool__ = __index__ = _refuse_arithmetic
    __iter__ = _refuse_arithmetic
    __array__ = _refuse_arithmetic


def _take_snapshot(value: Any) -> Any:
    """Return a value that later writes of the caller do not change."""
    if isinstance(value, list):
        return [_take_snapshot(v) for v in value]
    return copy_if_writable(value)


# Every number divides zero rows, so empty arrays need a limit of their own.
MAX_PER_SHARD = 1 << 16


def shards_by_replica(array: jax.Array) -> tuple[jax.Array, ...]:
    """Return the shards of an array along dim 0, in row order, without a copy."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        lead, rest = tuple(sharding.spec)[:1], tuple(sharding.spec)[1:]
        # A local value has several shards if another dim is sharded. The shards of an array
        # without elements may share one start.
        if any(entry is not None for entry in rest) or (lead and not array.size):
            return tuple(_assemble_values(array, sharding))
    # Devices of one replica may hold equal copies; the first shard with a start is enough.
    first: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        first.setdefault(shard.index[0].start or 0, shard.data)
    return tuple(first[start] for start in sorted(first))


def _fix_empty_shard(part: jax.Array, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Return a shard in its proper shape."""
    # XLA does not split an array without elements: each of its shards has the shape of the whole.
    if part.size:
        return part
    # Also for random keys, of which NumPy has no zeros.
    return jax.device_put(part.reshape(sharding.shard_shape(shape)), part.sharding)


def _assemble_values(array: jax.Array, sharding: NamedSharding) -> list[jax.Array]:
    """Return, for each replica, one array over its logical devices, made of its shards."""
    lead, *rest = tuple(sharding.spec)
    axes = (lead,) if isinstance(lead, str) else tuple(lead or ())
    mesh: Any = sharding.mesh  # not abstract, since the array has devices
    layout = ReplicaMesh(mesh, axes)
    by_device = {s.device: s.data for s in array.addressable_shards}
    local = (array.shape[0] // layout.num_replicas, *array.shape[1:])
    pieces: list[jax.Array] = []
    for replica in layout.local_replicas:
        here = NamedSharding(layout.replica_mesh(replica), PartitionSpec(None, *rest))
        parts = [_fix_empty_shard(by_device[d], here, local) for d in layout.device_grid[replica]]
        pieces.append(jax.make_array_from_single_device_arrays(local, here, parts))
    return pieces


def _format_value(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return repr(value)
    # Random keys have a dtype that NumPy does not know.
    if isinstance(value, (jax.Array, np.ndarray)) and isinstance(value.dtype, np.dtype):
        held = np.asarray(value)
        return np.array2string(held, separator=", ", threshold=16) if held.ndim else str(held[()])
    return repr(value)


def _flatten_with_keys(value: PerReplica) -> tuple[Sequence[tuple[Any, Any]], Storage]:
    if value._form is Form.LOCAL:
        keyed = [(GetAttrKey(f"values[{i}]"), v) for i, v in enumerate(value._data)]
        return keyed, value._flat[1]
    return [(GetAttrKey("array"), value._data)], value._flat[1]


# Without the checks of `__init__`, which JAX's placeholders would not pass. A global, since
# unflattening runs in every step.
_new = object.__new__


def _rebuild(how: Storage, children: Iterable[Any]) -> PerReplica:
    value = _new(PerReplica)
    value._flat = (tuple(children), how)
    return value


def hold_global(held: Any, *, scalars: bool, replicas_per_shard: int) -> PerReplica:
    """Act as `PerReplica.of_global`, without checks, on any object instead of the array."""
    return _rebuild((Form.SCALARS if scalars else Form.ROWS, replicas_per_shard), (held,))


register_pytree_with_keys(PerReplica, _flatten_with_keys, _rebuild, operator.attrgetter("_flat"))
