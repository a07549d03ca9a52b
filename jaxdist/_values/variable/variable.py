"""A value that lives on the devices of a strategy and can be assigned."""

from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_flag, check_instance
from jaxdist._values.access import Access, Change, site
from jaxdist._values.replicas.binding import current_binding
from jaxdist._values.replicas.distributed import DistributedValues
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.replicas.placement import Kind, placement_of
from jaxdist._values.variable.across import ACROSS, check_can_combine
from jaxdist._values.variable.arguments import check_name, elements_at
from jaxdist._values.variable.blocks import BlockChanges
from jaxdist._values.variable.checks import check_aggregation, check_modes, initial_array
from jaxdist._values.variable.documented import DocumentedNames
from jaxdist._values.variable.enums import VariableAggregation, VariableSynchronization
from jaxdist._values.variable.operators import ValueOperators
from jaxdist._values.variable.placement import VariablePlacement
from jaxdist._values.variable.rows import RowChanges
from jaxdist._values.variable.scatter import Scatter, checked_slices
from jaxdist._values.variable.slices import VariableSlice
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError

AUTO = VariableSynchronization.AUTO
NONE = VariableAggregation.NONE


@final
class Variable(ValueOperators, RowChanges, BlockChanges, DocumentedNames, DistributedValues):
    """A value that can be assigned, on the devices of the strategy in whose scope it is made.

    Outside a step its value is read and assigned as a whole. A step that `strategy.run` runs may
    read and assign variables that it has from a closure: inside, each replica works on its own
    copy, and the new values are there when `run` returns. To JAX it is its value:
    it may be an argument of `jax.numpy`, `jax.jit`, `jax.vmap` and `jax.grad`, and
    `jax.tree.map(jnp.asarray, tree)` gives the values that a checkpoint saves.
    `jax.tree.map(Variable.assign, tree, saved, is_leaf=lambda x: isinstance(x, Variable))` brings
    them back, under any strategy.

    Shapes:
        Mirrored (`AUTO`, `ON_WRITE`): one array `[...]`, replicated over the mesh. `ON_READ`:
        `[b, ...]` on each of `R` replicas, as a global array `[R*b, ...]`, a scalar as `[R]`.

    Cost:
        Making one copies the value to every device. Reading a mirrored one costs nothing; reading
        an `ON_READ` one outside a step combines all copies, one all-reduce of its bytes.

    Args:
        initial_value: An array, a number, or a function without arguments that makes one, which
            is called once.
        trainable: Whether optimizers should update it. None is True, but False for `ON_READ`.
        name: A name for messages and checkpoints.
        dtype: Dtype of the value; None takes that of `initial_value`.
        shape: Checked against `initial_value`.
        synchronization: When the copies are brought together.
        aggregation: How the values of the replicas become one: when they assign a mirrored
            variable, and when an `ON_READ` variable is read across replicas. With NONE, what the
            replicas assign to a mirrored variable has to be proved equal.

    Raises:
        ArgumentError: No initial value, a mode that does not exist or does not fit.
        ArgumentTypeError: An initial value that is per-replica or traced.
        ShapeError: Another shape than `shape`.
        ContextError: Inside a step.

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     w = Variable(2.0, name="w")
        >>> def step(x):
        ...     gradient = get_replica_context().all_reduce("mean", x)
        ...     w.assign_sub(0.5 * gradient)
        >>> strategy.run(step, (PerReplica(np.arange(8.0)),))
        >>> float(w)
        0.25

    Source:
        `tf.Variable`, and the variables that `tf.distribute` makes of it.
    """

    __slots__ = (
        "__weakref__",
        "_aggregation",
        "_held",
        "_home",
        "_label",
        "_strategy",
        "_synchronization",
        "_trainable",
    )

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        shape: Any = None,
        synchronization: VariableSynchronization = AUTO,
        aggregation: VariableAggregation = NONE,
    ) -> None:
        here = site()
        if name is not None:
            check_instance("Variable", "name", name, str, "a text", "Pass for instance name='w'.")
        self._label = "Variable" if name is None else name
        if here.in_step is not None:
            raise ContextError(
                f"Variable {self._label!r} was made inside a function run by strategy.run.\n\n"
                "The function is traced once, and a variable is kept for many calls.\n\n"
                "Make it before, inside `with strategy.scope():`, and use it in the function."
            )
        if current_binding() is not None:
            raise ContextError(
                f"Variable {self._label!r} was made inside a jaxdist.function.\n\n"
                "The function is traced once, and a variable is kept for many calls.\n\n"
                "Make it before, and use it in the function."
            )
        check_modes(self._label, synchronization, aggregation, in_scope=here.strategy is not None)
        array = initial_array(self._label, initial_value, dtype, shape)
        check_aggregation(self._label, aggregation, array.dtype)
        reads = synchronization is VariableSynchronization.ON_READ
        self._trainable = (
            not reads
            if trainable is None
            else as_flag(f"Variable {self._label!r}", "trainable", trainable)
        )
        if synchronization is AUTO and here.layout is not None:
            synchronization = VariableSynchronization.ON_WRITE
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._strategy = here.strategy
        self._home = _home_of(array, here.layout, on_read=reads)
        self._held = self._home.everywhere(array)
        _Process.has_variables = True

    # Reading

    def value(self) -> jax.Array:
        """The value: this replica's own inside a step, else that of all replicas together.

        Raises:
            ArgumentError: Read across replicas, when it is `ON_READ` with aggregation NONE.
            ContextError: Inside a plain `jax.jit`, which would keep the value for ever.

        Example:
            >>> Variable(3.0).value()
            Array(3., dtype=float32)
        """
        array: jax.Array = _access().read(self)
        return array

    def read_value(self) -> jax.Array:
        """The same as `value()`.

        Example:
            >>> Variable([1, 2]).read_value()
            Array([1, 2], dtype=int32)
        """
        return self.value()

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array.

        Example:
            >>> Variable([1, 2]).numpy()
            array([1, 2], dtype=int32)
        """
        return np.asarray(self.value())

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this process's replicas, in replica order; nothing is moved.

        Example:
            >>> with MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            ...     total = Variable(4, synchronization=VariableSynchronization.ON_READ,
            ...                      aggregation=VariableAggregation.SUM)
            >>> [int(v) for v in total.values]
            [4, 4]
        """
        if site().in_step is not None:
            raise ContextError(
                f"Variable {self._label!r}.values was read inside a function run by "
                "strategy.run.\n\nA replica has only its own copy there.\n\n"
                "Use value() for that, or read values after strategy.run."
            )
        if current_binding() is not None:
            raise ContextError(
                f"Variable {self._label!r}.values was read inside a jaxdist.function.\n\n"
                "Per-replica values are unavailable while a function is traced.\n\n"
                "Use value() for the combined value, or read values after the function."
            )
        return self._home.copies(self.held)

    @property
    def distributed(self) -> Any:
        """What `Strategy.reduce` and `gather` take it for: a mirrored array, or a `PerReplica`."""
        if self._home.per_replica:
            return PerReplica.of_global(self.held, scalars=not self.shape)
        return self.value()

    # Assigning

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Give it a new value.

        Outside a step every copy gets `value`; an `ON_READ` variable with aggregation SUM is
        divided among the replicas, so that it reads as `value`. A `PerReplica` gives each replica
        of an `ON_READ` variable its own, and is combined by the aggregation of a mirrored one.
        In a step, `ON_READ` changes this replica's own copy; a mirrored variable takes the values
        of all replicas together, combined by its aggregation.

        Shapes:
            `value` has the shape of the variable; nothing is broadcast.

        Cost:
            In a step, a mirrored variable with SUM, MEAN or ONLY_FIRST_REPLICA: one all-reduce of
            its bytes. Outside a step, one copy to each device.

        Args:
            value: An array or a number; it is cast where that loses no more than precision.
            use_locking: Without effect: an assignment is whole or not at all.
            name: Without effect; TensorFlow names the operation by it.
            read_value: Whether to return the new value.

        Returns:
            The new value as seen from here, or None.

        Raises:
            ShapeError: Another shape.
            ArgumentTypeError: A dtype that cannot be cast.
            ReplicaValueError: A `PerReplica` for a mirrored variable without aggregation.
            ArgumentError: In a step, a constant for a variable with aggregation SUM.
            StateDivergenceError: From `strategy.run`: mirrored with aggregation NONE, and the
                replicas assign values that are not proved equal.

        Example:
            >>> v = Variable(1.0)
            >>> v.assign(5.0)
            Array(5., dtype=float32)
        """
        if name is not None or use_locking is not False:
            check_name(self._label, "assign", name, use_locking)
        return self._update(Change.ASSIGN, value, read_value=read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Add to it; everything else is as for `assign`.

        Raises:
            ArgumentError: Across replicas, when it is `ON_READ` with aggregation SUM.

        Example:
            >>> Variable(1.0).assign_add(5.0)
            Array(6., dtype=float32)
        """
        if name is not None or use_locking is not False:
            check_name(self._label, "assign_add", name, use_locking)
        return self._update(Change.ADD, delta, read_value=read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtract from it; everything else is as for `assign_add`.

        Example:
            >>> Variable(1.0).assign_sub(5.0)
            Array(-4., dtype=float32)
        """
        if name is not None or use_locking is not False:
            check_name(self._label, "assign_sub", name, use_locking)
        return self._update(Change.SUBTRACT, delta, read_value=read_value)

    def _update(self, change: Change, value: Any, *, read_value: bool) -> Any:
        if read_value is not True:
            as_flag(f"Variable {self._label!r}.{change.value}", "read_value", read_value)
        access = _access()
        if isinstance(value, Variable):
            value = value.value()
        if read_value and access is ACROSS and self._home.per_replica:
            check_can_combine(self, "changed, and its new value asked for,")
        access.update(self, change, value)
        return access.read(self) if read_value else None

    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> jax.Array:
        check_name(self._label, kind.value, name, use_locking)
        access = _access()
        access.scatter(self, kind, checked_slices(self, kind, given))
        array: jax.Array = access.read(self)
        return array

    def _apply_blocks(self, kind: Scatter, blocks: Any) -> jax.Array:
        access = _access()
        access.scatter(self, kind, blocks)
        array: jax.Array = access.read(self)
        return array

    def __getitem__(self, index: Any) -> VariableSlice:
        held = self.value()
        elements = elements_at(f"Variable {self._label!r}[index]", held, index)
        return VariableSlice(self, index, elements)

    # Facts

    @property
    def name(self) -> str:
        """Its name as TensorFlow writes it.

        Example:
            >>> Variable(1.0, name="w").name
            'w:0'
        """
        return f"{self._label}:0"

    @property
    def label(self) -> str:
        """Its name as it was given."""
        return self._label

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self._home.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value as one replica sees it."""
        return self._home.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._home.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self._home.shape))

    @property
    def trainable(self) -> bool:
        """Whether optimizers should update it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas become one."""
        return self._aggregation

    @property
    def home(self) -> VariablePlacement:
        """Where its copies lie."""
        return self._home

    @property
    def held(self) -> jax.Array:
        """The one array that holds all copies."""
        binding = current_binding()
        if binding is None:
            return self._held
        array: jax.Array = binding.held(self, self._held)
        return array

    @held.setter
    def held(self, array: jax.Array) -> None:
        binding = current_binding()
        if binding is None:
            self._held = array
        else:
            binding.hold(self, array)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was made, or None."""
        return self._strategy

    def ref(self) -> "VariableRef":
        """A key for dicts and sets; a variable itself is none, for `==` is elementwise.

        Example:
            >>> v = Variable(1.0)
            >>> {v.ref(): "seen"}[v.ref()], v.ref().deref() is v
            ('seen', True)
        """
        return VariableRef(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        other: Variable = object.__new__(Variable)
        memo[id(self)] = other
        for slot in self.__slots__:
            if slot != "__weakref__":
                setattr(other, slot, getattr(self, slot))
        return other

    def __copy__(self) -> "Variable":
        return self.__deepcopy__({})

    def __repr__(self) -> str:
        what = f"Variable {self.name!r} {self.dtype}{list(self.shape)}"
        if site().in_step is not None or current_binding() is not None:
            return f"<{what}>"
        held: Any = self.distributed if self._home.per_replica else np.asarray(self._held)
        return f"<{what} {held!r}>"


def _value_for_jax(variable: Variable) -> Any:
    jacobian = _compat.jacobian_that_asks()
    if jacobian is not None:
        label = variable.label
        raise ArgumentTypeError(
            f"jax.{jacobian} was called with Variable {label!r} {variable.dtype}"
            f"{list(variable.shape)} as the argument that it differentiates.\n\n"
            "jax.jacrev, jax.jacfwd, jax.jacobian and jax.hessian put arrays into the structure "
            "of their arguments, and what takes the place of a variable is an array. jax.grad, "
            "jax.vjp and jax.jvp take a variable.\n\n"
            f"Pass {_as_name(label)}.value() in its place."
        )
    try:
        return variable.value()
    except ArgumentError:
        # It has no one value here; what asks only for the structure goes on.
        return NoValue(variable)


def _as_name(label: str) -> str:
    return label if label.isidentifier() else "variable"


class NoValue:
    """Stands for the value of a variable that has none across replicas: asking for it raises."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._variable.value())

    def __jax_array__(self) -> jax.Array:
        return self._variable.value()


# A variable goes into functions of JAX as its value, and what comes back in its place (a gradient,
# a mapped value) is no variable.
jax.tree_util.register_pytree_with_keys(
    Variable,
    lambda v: (((jax.tree_util.GetAttrKey("value"), _value_for_jax(v)),), None),
    lambda _, values: next(iter(values)),
    lambda v: ((_value_for_jax(v),), None),
)


class VariableRef:
    """A variable as a key: equal to another one of the same variable."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """The variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableRef) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"


def held_by(variables: Sequence[Variable]) -> list[jax.Array]:
    """The arrays that hold the copies of these variables."""
    if current_binding() is not None:
        return [v.held for v in variables]
    return [v._held for v in variables]


def hold_all(variables: Sequence[Variable], arrays: Sequence[jax.Array]) -> None:
    """Give every variable the array that a step left for it."""
    for variable, array in zip(variables, arrays, strict=True):
        home = variable._home
        if current_binding() is not None:
            variable.held = array
        else:
            variable._held = array if home.layout is not None else home.brought_home(array)


class _Process:
    """What is the same for all variables of this process."""

    has_variables = False


def any_variable() -> bool:
    """Whether this process has made any variable."""
    return _Process.has_variables


def _access() -> Access:
    in_step = site().in_step
    return ACROSS if in_step is None else in_step


def _home_of(array: Any, layout: ReplicaMesh | None, *, on_read: bool) -> VariablePlacement:
    """Where a variable that starts as `array` lives; an array's own split over logical axes stays.

    With one replica there is one copy, and nothing to bring together.
    """
    shape = tuple(array.shape)
    if layout is None:
        return VariablePlacement(None, None, False, shape, array.dtype)
    per_replica = on_read and layout.num_replicas > 1
    found = placement_of(array, layout)
    sharding = found.sharding if found.kind is Kind.MIRRORED else layout.replicated
    if per_replica:
        sharding = layout.per_replica
    return VariablePlacement(layout, sharding, per_replica, shape, array.dtype)
