"""`ShardedVariable`: a variable that is cut into shards along its first dim."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self, final

import jax
import numpy as np

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._parameter_server.variables import shard_rows
from jaxdist._parameter_server.variables.make_shards import keep_array
from jaxdist._parameter_server.variables.shard_rows import read_index, split_slices
from jaxdist._parameter_server.worker_protocol import Part
from jaxdist._validate import as_flag, check_instance, show
from jaxdist._values import (
    Assignable,
    Change,
    DistributedValues,
    Instead,
    Scatter,
    ValueOperators,
    Variable,
    as_indexed_slices,
    check_ids,
    check_name,
    check_slices,
    check_value,
)
from jaxdist.errors import ArgumentTypeError, ReplicaValueError, ShapeError

# Names that each shard has; `read_rows(ids)` is used too, if the first shard has it.
_NAMES = (
    "shape dtype name trainable value numpy assign assign_add assign_sub scatter_add sparse_read"
).split()
_SHARDS = "a list of one or more variables, the shards in the order of their rows"


class ShardedRowChanges:
    """A base class with the `scatter_*` methods of a sharded variable.

    Each shard gets only its own rows. For `scatter_add` and `scatter_sub`, rows with the same index
    are added up before that. All methods take `IndexedSlices`, or a `BCOO` of whole rows, and
    return the variable.
    """

    __slots__ = ()

    _variables: tuple[Any, ...]
    _starts: np.ndarray
    _label: str

    @called(lambda kind: kind.value)
    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> Self:
        check_name(self._label, name, use_locking)
        slices = check_slices(self, kind, given)
        for shard, own in split_slices(kind, slices, self._variables, self._starts):
            if hasattr(shard, "change_rows"):
                # The methods `scatter_*` of a variable on a server return, and so read, all of it.
                shard.change_rows(kind, own)
            else:
                getattr(shard, kind.value)(own)
        return self

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Add rows to some rows, as `Variable.scatter_add`."""
        return self._scatter(Scatter.ADD, sparse_delta, use_locking, name)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Subtract rows from some rows, as `Variable.scatter_sub`."""
        return self._scatter(Scatter.SUBTRACT, sparse_delta, use_locking, name)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Multiply some rows, as `Variable.scatter_mul`."""
        return self._scatter(Scatter.MULTIPLY, sparse_delta, use_locking, name)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Divide some rows, as `Variable.scatter_div`."""
        return self._scatter(Scatter.DIVIDE, sparse_delta, use_locking, name)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Take the minimum of some rows and the given ones, as `Variable.scatter_min`."""
        return self._scatter(Scatter.MIN, sparse_delta, use_locking, name)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Take the maximum of some rows and the given ones, as `Variable.scatter_max`."""
        return self._scatter(Scatter.MAX, sparse_delta, use_locking, name)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace some rows, as `Variable.scatter_update`."""
        return self._scatter(Scatter.UPDATE, sparse_delta, use_locking, name)

    @called("batch_scatter_update")
    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace some rows, as `scatter_update`: indices have one dim, so there is one batch."""
        check_name(self._label, name, use_locking)
        slices = as_indexed_slices(self._label, sparse_delta)
        return self._scatter(Scatter.UPDATE, slices, use_locking, name)


@final
class ShardedVariable(ShardedRowChanges, ValueOperators, Assignable):
    """One variable whose rows are on several variables, the shards.

    A `ParameterServerStrategy` with a `variable_partitioner` makes it of a large variable, with the
    shards on different servers. It has the operators of an array, and functions of JAX use its
    value, which is the concatenation of the shards. Row by row it moves only what is asked for:
    `sparse_read`, `table[rows]` and `nn.embedding_lookup` read, and the `scatter_*` methods change,
    only rows of the shards that have them. As an argument of `jaxdist.function`, `run` and
    `schedule` it is one variable, and the function gets the variable itself.

    Cost:
        `value()`, operators, and functions of JAX that take it move all shards.

    Args:
        variables: The shards, in the order of their rows: variables of one dtype, with the same
            dims after the first. Each has what `Variable` has; if one has `read_rows(ids)`, it is
            called to move only these rows, and its `scatter_*` drop rows with the id -1.
        name: A name for messages and checkpoints.

    Raises:
        ArgumentTypeError: Not a list of variables, or an empty one.
        ArgumentError: Different dtypes, or a variable that is listed twice.
        ShapeError: A scalar, or different dims after the first.

    Example:
        >>> from jaxdist._parameter_server.variables import ShardedVariable
        >>> table = ShardedVariable([Variable([[1.0], [2.0]]), Variable([[3.0]])], name="table")
        >>> table.shape, table.sparse_read([2, 0]).tolist()
        ((3, 1), [[3.0], [1.0]])

    Source:
        `tf.python.distribute.sharded_variable.ShardedVariable`.
    """

    __slots__ = ("__weakref__", "_label", "_shape", "_starts", "_variables")

    @called("ShardedVariable")
    def __init__(self, variables: Sequence[Any], name: str = "ShardedVariable") -> None:
        check_instance("name", name, str, "a string", "Pass for instance name='w'.")
        self._label = name
        self._variables = _check_shards(variables)
        rows = [int(v.shape[0]) for v in self._variables]
        self._starts = np.cumsum([0, *rows[:-1]])
        self._shape = (sum(rows), *map(int, self._variables[0].shape[1:]))
        for shard, start, count in zip(self._variables, self._starts.tolist(), rows, strict=True):
            if hasattr(shard, "become_part"):
                shard.become_part(Part(name, start, count, self._shape[0]))

    # Reading

    def value(self) -> jax.Array:
        """Return the whole value: the shards one after the other."""
        return shard_rows.join([v.value() for v in self._variables])

    def read_value(self) -> jax.Array:
        """Return the whole value, as `value()` does."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """Return the whole value as a NumPy array."""
        return np.concatenate([np.asarray(v.numpy()) for v in self._variables])

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Return rows, in the order of `indices`; only these rows move, each of them once.

        Shapes:
            `indices` `[...]` gives `[..., *shape[1:]]`.

        Args:
            indices: Integers from 0.
            name: Without effect; TensorFlow names the operation by it.

        Raises:
            ArgumentError: An index is out of bounds. In a step such rows are nan.
            ArgumentTypeError: The indices are not integers.

        Example:
            >>> from jaxdist._parameter_server.variables import ShardedVariable
            >>> table = ShardedVariable([Variable([1.0, 2.0]), Variable([3.0])])
            >>> table.sparse_read([[2, 0], [2, 2]]).tolist()
            [[3.0, 1.0], [3.0, 3.0]]

        Source:
            `ShardedVariable.sparse_read`, which returns the rows grouped by shard.
        """
        return self._read_rows("sparse_read", "indices", indices, name)

    @called(lambda method: method)
    def _read_rows(self, method: str, parameter: str, given: Any, name: Any) -> jax.Array:
        check_name(self._label, name)
        ids = call_as(
            f"ShardedVariable {self._label!r}.{method}", check_ids, parameter, given, self
        )
        if isinstance(ids, jax.core.Tracer):
            found: jax.Array = shard_rows.select_rows(self._variables, self._starts, ids)
            return found
        rows = shard_rows.read_rows(self._variables, self._starts, ids.ravel())
        return rows.reshape((*ids.shape, *self._shape[1:]))

    def read_rows(self, ids: Any) -> jax.Array:
        """Return rows, as `sparse_read` does."""
        return self._read_rows("read_rows", "ids", ids, None)

    def gather(self, indices: Any, name: str | None = None) -> jax.Array:
        """Return rows, as `sparse_read` does; `tf.gather` of a sharded variable."""
        return self._read_rows("gather", "indices", indices, name)

    _instead = Instead(
        "The servers change the rows of a sharded variable, by its methods.",
        "Call variable.scatter_update(jaxdist.IndexedSlices(rows, ids)) for rows, or "
        "variable.assign(value) for all.",
    )

    def _name_with_items(self) -> str:
        return f"ShardedVariable {self._label!r}"

    @called(lambda self: f"ShardedVariable {self._label!r}[index]")
    def __getitem__(self, index: Any) -> jax.Array:
        return read_index(self, self._variables, self._starts, index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._variables)

    def __len__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"len was called on ShardedVariable {self._label!r}.\n\n"
            f"It has {len(self._variables)} shard(s), which a loop returns, and {self._shape[0]} "
            "rows.\n\nUse len(variable.variables) or variable.shape[0]."
        )

    # Assigning

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> "ShardedVariable":
        """Assign each shard its rows of `value`; everything else is as for `Variable.assign`.

        Raises:
            ShapeError: `value` has another shape. TensorFlow drops the rows that are too many.

        Returns:
            This object.
        """
        return self._update(Change.ASSIGN, value, use_locking, name, read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> "ShardedVariable":
        """Add to each shard its rows of `delta`; everything else is as for `assign`."""
        return self._update(Change.ADD, delta, use_locking, name, read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> "ShardedVariable":
        """Subtract from each shard its rows of `delta`; everything else is as for `assign`."""
        return self._update(Change.SUBTRACT, delta, use_locking, name, read_value)

    @called(lambda self, change: f"ShardedVariable {self._label!r}.{change.value}")
    def _update(
        self, change: Change, value: Any, use_locking: Any, name: Any, read_value: Any
    ) -> "ShardedVariable":
        call_as(
            change.value,
            check_name,
            self._label,
            name,
            False if use_locking is None else use_locking,
        )
        as_flag("read_value", read_value)
        if isinstance(value, (Variable, ShardedVariable)):
            value = value.value()
        parameter = "value" if change is Change.ASSIGN else "delta"
        if isinstance(value, DistributedValues):
            raise refuse(
                f"{parameter}={show(value)}.",
                "A sharded variable has one value for all replicas.",
                "Combine the values first: strategy.reduce('MEAN', value, axis=None).",
                kind=ReplicaValueError,
            )
        given = keep_array(parameter, value)
        # The shards check their rows too, but then some of them would have changed already.
        call_as(change.value, check_value, self._label, parameter, given, self._shape, self.dtype)
        for shard, start in zip(self._variables, self._starts.tolist(), strict=True):
            own = given[start : start + int(shard.shape[0])]
            getattr(shard, change.value)(own, read_value=False)
        return self

    # Properties

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return list(self._variables)

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._label

    @property
    def label(self) -> str:
        """The name that was given."""
        return self._label

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all shards together."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the shards."""
        return self._variables[0].dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self._shape))

    @property
    def trainable(self) -> bool:
        """Whether optimizers should update it."""
        return bool(self._variables[0].trainable)

    def __copy__(self) -> "ShardedVariable":
        # As for `Variable`: what is assigned to a copy does not change the original.
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        rows = ", ".join(str(int(v.shape[0])) for v in self._variables)
        return f"<ShardedVariable {self._label!r} {self.dtype}{list(self._shape)} of {rows} rows>"


def list_shards(variable: Any) -> Sequence[Any]:
    """Return the shards of a variable; one that is whole is its only shard."""
    return variable.variables if isinstance(variable, ShardedVariable) else [variable]


def _check_shards(given: Any) -> tuple[Any, ...]:
    remedy = "Pass for instance [jaxdist.Variable(rows), jaxdist.Variable(more_rows)]."
    is_list = isinstance(given, (list, tuple))
    if not is_list or not given or not all(all(hasattr(v, n) for n in _NAMES) for v in given):
        raise refuse_type(f"variables={show(given)}.", f"variables is {_SHARDS}.", remedy)
    shapes, dtypes = [tuple(v.shape) for v in given], [str(v.dtype) for v in given]
    if len(set(dtypes)) > 1:
        raise refuse(
            f"variables of the dtypes {dtypes}.",
            "The shards are rows of one array, which has one dtype.",
            f"Make all of them with dtype={dtypes[0]!r}.",
        )
    if () in shapes or len({shape[1:] for shape in shapes}) > 1:
        raise refuse(
            f"variables of the shapes {list(map(list, shapes))}.",
            "The shards are rows of one array: each has a dim of rows, and their other dims are "
            "the same.",
            f"Give all of them the shape [rows, {', '.join(map(str, shapes[0][1:]))}].",
            kind=ShapeError,
        )
    if len(set(map(id, given))) < len(given):
        raise refuse(
            f"{len(given)} variables, and {len(given) - len(set(map(id, given)))} of them more "
            "than once.",
            "Each shard has its own rows.",
            "Pass each variable once.",
        )
    return tuple(given)


# As for `Variable`: functions of JAX get the value, and rebuild an array in its place.
jax.tree_util.register_pytree_with_keys(
    ShardedVariable,
    lambda v: (((jax.tree_util.GetAttrKey("value"), v.value()),), None),
    lambda _, values: next(iter(values)),
    lambda v: ((v.value(),), None),
)
