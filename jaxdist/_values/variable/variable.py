"""`Variable`: a value on the devices of a strategy that can be assigned."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._called import call_as, called
from jaxdist._hooks import GET_CALL_CONTEXT
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_flag, check_instance
from jaxdist._values.access import (
    Access,
    Assignable,
    Change,
    VariableAggregation,
    VariableSynchronization,
    get_call_context,
)
from jaxdist._values.arrays import make_deleted_error
from jaxdist._values.items import Instead
from jaxdist._values.replicas.binding import current_binding
from jaxdist._values.replicas.per_replica import DistributedValues
from jaxdist._values.replicas.placement import Kind, placement_of
from jaxdist._values.variable.across import ACROSS
from jaxdist._values.variable.arguments import check_name, get_elements
from jaxdist._values.variable.blocks import BlockChanges, VariableSlice
from jaxdist._values.variable.checks import (
    check_aggregation,
    check_may_make,
    check_modes,
    make_initial_array,
)
from jaxdist._values.variable.documented import DocumentedNames, ValueOperators
from jaxdist._values.variable.placement import VariablePlacement
from jaxdist._values.variable.scatter import RowChanges, Scatter, check_slices
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError

AUTO = VariableSynchronization.AUTO
NONE = VariableAggregation.NONE


class Variable(
    ValueOperators, RowChanges, BlockChanges, DocumentedNames, DistributedValues, Assignable
):
    """A value that can be assigned, on the devices of the strategy in whose scope it is created.

    Outside a step, code reads and assigns the value as a whole. A step that `strategy.run` runs may
    read and assign variables of its closure. Inside, each replica works on its own copy; when `run`
    returns, the variables have the new values. Functions of JAX use the variable's value: it
    may be an argument of `jax.numpy`, `jax.jit`, `jax.vmap` and `jax.grad`. To save variables,
    `jax.tree.map(jnp.asarray, tree)` returns their values; to restore them under any strategy, use
    `jax.tree.map(Variable.assign, tree, saved, is_leaf=lambda x: isinstance(x, Variable))`.

    Shapes:
        Mirrored (`AUTO`, `ON_WRITE`): one array `[...]`, replicated over the mesh. `ON_READ`:
        `[b, ...]` on each of `R` replicas, as a global array `[R*b, ...]`; a scalar as `[R]`.

    Cost:
        Creating a variable copies its value to every device. Reading a mirrored variable is free.
        Reading an `ON_READ` variable outside a step combines all copies: one all-reduce of its
        bytes.

    Args:
        initial_value: An array, a number, or a function without arguments that returns one; it is
            called once.
        trainable: Whether optimizers should update it. None means True, but False for `ON_READ`.
        name: A name for messages and checkpoints.
        dtype: Dtype of the value; None means the dtype of `initial_value`.
        shape: The expected shape of `initial_value`, or None.
        synchronization: When the copies are synchronized.
        aggregation: How the values of the replicas become one value: when replicas assign a
            mirrored variable, and when code reads an `ON_READ` variable across replicas. With NONE,
            the values that replicas assign to a mirrored variable must be proved equal.

    Raises:
        ArgumentError: No initial value, or a mode that does not exist or does not fit.
        ArgumentTypeError: The initial value is per-replica or traced.
        ShapeError: The initial value does not have the shape `shape`.
        ContextError: Created inside a step, or in a function that makes the dataset of a worker.

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
        `tf.Variable`, and the variables that `tf.distribute` makes from it.
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

    _instead = Instead(
        "All copies of a variable change together, by its methods.",
        "Call variable[index].assign(value), variable.scatter_update(slices) for rows, or "
        "variable.assign(value) for all elements.",
    )

    # How to give all replicas one value, where a class of variables has a way of its own.
    _remedy_of_divergence = ""
    # Whether it belongs to a metric of Keras, which counts what all replicas have.
    _is_of_metric = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A strategy may have variables of its own: those of parameter servers are on the servers.
        name = kwargs.get("name")
        check_may_make(name if isinstance(name, str) and name else "Variable")
        create = getattr(get_call_context().strategy, "_create_variable", None)
        if create is None or cls is not Variable:
            return object.__new__(cls)
        return create(args, kwargs)

    @_compat.outside_of_meshes
    @called("Variable")
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
        here = get_call_context()
        if name is not None:
            check_instance("name", name, str, "a text", "Pass for instance name='w'.")
        self._label = "Variable" if name is None else name
        in_step = here.in_step is not None
        if in_step or current_binding() is not None:
            place = "function run by strategy.run" if in_step else "jaxdist.function"
            scope = ", inside `with strategy.scope():`" if in_step else ""
            raise ContextError(
                f"Variable {self._label!r} was made inside a {place}.\n\n"
                "The function is traced once, and a variable is kept for many calls.\n\n"
                f"Make it before{scope}, and use it in the function."
            )
        check_modes(self._label, synchronization, aggregation, in_scope=here.strategy is not None)
        self._strategy = here.strategy
        array = self._make_initial(initial_value, dtype, shape)
        check_aggregation(self._label, aggregation, array.dtype)
        reads = synchronization is VariableSynchronization.ON_READ
        self._trainable = (
            not reads
            if trainable is None
            else call_as(f"Variable {self._label!r}", as_flag, "trainable", trainable)
        )
        if synchronization is AUTO and here.layout is not None:
            synchronization = VariableSynchronization.ON_WRITE
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._hold_initial(array, here.layout)
        _Process.has_variables = True

    # `__new__` takes any arguments; without this, tools that show parameters would show those.
    __signature__ = inspect.Signature([*inspect.signature(__init__).parameters.values()][1:])

    def _make_initial(self, initial_value: Any, dtype: Any, shape: Any) -> Any:
        """Return the first value."""
        return make_initial_array(self._label, initial_value, dtype, shape)

    def _hold_initial(self, array: Any, layout: ReplicaMesh | None) -> None:
        """Place the variable, and store its first value."""
        on_read = self._synchronization is VariableSynchronization.ON_READ
        self._home = _place_variable(array, layout, on_read=on_read)
        self._held = self._home.keep(self._home.copy_to_all(array))

    # Reading

    def value(self) -> jax.Array:
        """Return the value: inside a step this replica's own, else that of all replicas together.

        Raises:
            ArgumentError: Read across replicas, and `ON_READ` with aggregation NONE.
            ContextError: Read inside a plain `jax.jit`, which would keep the value forever.

        Example:
            >>> Variable(3.0).value()
            Array(3., dtype=float32)
        """
        return _find_access().read(self)

    def read_value(self) -> jax.Array:
        """Return the value, as `value()` does.

        Example:
            >>> Variable([1, 2]).read_value()
            Array([1, 2], dtype=int32)
        """
        return self.value()

    def numpy(self) -> np.ndarray:
        """Return the value as a NumPy array.

        Example:
            >>> Variable([1, 2]).numpy()
            array([1, 2], dtype=int32)
        """
        return np.asarray(self.value())

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this process's replicas, in replica order; moves nothing.

        Example:
            >>> with MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            ...     total = Variable(4, synchronization=VariableSynchronization.ON_READ,
            ...                      aggregation=VariableAggregation.SUM)
            >>> [int(v) for v in total.values]
            [4, 4]
        """
        if get_call_context().in_step is not None:
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
        """The variable as `Strategy.reduce` and `gather` see it: an array, or a `PerReplica`."""
        if self._home.per_replica:
            return self._home.as_per_replica(self.held)
        return self.value()

    # Assigning

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign a new value.

        Outside a step every copy gets `value`. For an `ON_READ` variable with aggregation SUM,
        `value` is divided among the replicas, so that reading returns `value`. A `PerReplica`
        assigns each replica of an `ON_READ` variable its own value; for a mirrored variable, the
        aggregation combines its values.
        In a step, `ON_READ` changes this replica's own copy. A mirrored variable gets the values of
        all replicas, combined by its aggregation.

        Shapes:
            `value` has the shape of the variable; nothing is broadcast.

        Cost:
            In a step, one all-reduce of the bytes of a mirrored variable with SUM, MEAN or
            ONLY_FIRST_REPLICA. Outside a step, one copy to each device.

        Args:
            value: An array or a number; it is cast if the cast loses no more than precision.
            use_locking: Without effect: an assignment changes all copies or none.
            name: Without effect; TensorFlow names the operation by it.
            read_value: Whether to return the new value.

        Returns:
            The new value as the caller sees it, or None.

        Raises:
            ShapeError: `value` has another shape.
            ArgumentTypeError: The dtype of `value` cannot be cast.
            ReplicaValueError: `value` is a `PerReplica`, and the variable is mirrored without
                aggregation.
            ArgumentError: In a step, `value` is a constant, and the aggregation is SUM.
            StateDivergenceError: From `strategy.run`: the variable is mirrored with aggregation
                NONE, and the replicas assign values that are not proved equal.

        Example:
            >>> v = Variable(1.0)
            >>> v.assign(5.0)
            Array(5., dtype=float32)
        """
        return self._update(Change.ASSIGN, value, use_locking, name, read_value=read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Add `delta` to the value; everything else is as for `assign`.

        Raises:
            ArgumentError: Called across replicas for an `ON_READ` variable with aggregation SUM.

        Example:
            >>> Variable(1.0).assign_add(5.0)
            Array(6., dtype=float32)
        """
        return self._update(Change.ADD, delta, use_locking, name, read_value=read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtract `delta` from the value; everything else is as for `assign_add`.

        Example:
            >>> Variable(1.0).assign_sub(5.0)
            Array(-4., dtype=float32)
        """
        return self._update(Change.SUBTRACT, delta, use_locking, name, read_value=read_value)

    @called(lambda change: change.value)
    def _update(
        self, change: Change, value: Any, use_locking: Any, name: Any, *, read_value: bool
    ) -> Any:
        # The defaults are tested here, because the call would cost more than the test.
        if name is not None or use_locking is not False:
            check_name(self._label, name, use_locking)
        if read_value is not True:
            call_as(f"Variable {self._label!r}.{change.value}", as_flag, "read_value", read_value)
        access = _find_access()
        if isinstance(value, Variable):
            value = value.value()
        return access.update(self, change, value, read_value=read_value)

    @called(lambda kind: kind.value)
    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> jax.Array:
        check_name(self._label, name, use_locking)
        return self._apply_blocks(kind, check_slices(self, kind, given))

    def _apply_blocks(self, kind: Scatter, blocks: Any) -> jax.Array:
        access = _find_access()
        access.scatter(self, kind, blocks)
        return access.read(self)

    def _name_with_items(self) -> str:
        return f"Variable {self._label!r}"

    @_compat.outside_of_meshes
    @called(lambda self: f"Variable {self._label!r}[index]")
    def __getitem__(self, index: Any) -> VariableSlice:
        return VariableSlice(self, index, get_elements(self.value(), index))

    # Properties

    @property
    def name(self) -> str:
        """The name as TensorFlow writes it.

        Example:
            >>> Variable(1.0, name="w").name
            'w:0'
        """
        return f"{self._label}:0"

    @property
    def label(self) -> str:
        """The name that the user gave."""
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
        """When the copies are synchronized."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas become one."""
        return self._aggregation

    @property
    def home(self) -> VariablePlacement:
        """Where the copies are placed."""
        return self._home

    @property
    def held(self) -> jax.Array:
        """The one array that holds all copies."""
        # In a `jaxdist.function` the array is an argument or a result of the compiled function.
        binding = current_binding()
        if binding is None:
            check_alive((self,))
            home = self._home
            return self._held if home.store is None else home.bring(self._held)
        return binding.held(self, self._held)

    @held.setter
    def held(self, array: jax.Array) -> None:
        binding = current_binding()
        if binding is None:
            home = self._home
            self._held = array if home.store is None else home.keep(array)
        else:
            binding.hold(self, array)

    @property
    def one_copy(self) -> jax.Array:
        """The array that changes outside of a step are computed from."""
        if current_binding() is not None:
            return self.held
        check_alive((self,))
        return self._home.bring_one(self._held)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the variable was created, or None."""
        return self._strategy

    def ref(self) -> "VariableRef":
        """Return a key for dicts and sets; a variable is not a key, since `==` is elementwise.

        Example:
            >>> v = Variable(1.0)
            >>> {v.ref(): "seen"}[v.ref()], v.ref().deref() is v
            ('seen', True)
        """
        return VariableRef(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        # The arrays are shared, since they never change: assigning replaces them.
        other: Variable = object.__new__(Variable)
        memo[id(self)] = other
        for slot in self.__slots__:
            if slot != "__weakref__":
                setattr(other, slot, getattr(self, slot))
        return other

    def __copy__(self) -> "Variable":
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._strategy is None:
            return super().__reduce_ex__(protocol)
        raise ContextError(
            f"{self.name!r}, a Variable of a {type(self._strategy).__name__}, was pickled.\n\n"
            "It is on the devices of its strategy, which belong to this process.\n\n"
            "Pickle np.asarray(variable), or save it with jaxdist.training.Checkpoints."
        )

    def __repr__(self) -> str:
        what = f"Variable {self.name!r} {self.dtype}{list(self.shape)}"
        # While tracing, printing must not read the variable: a read would become part of the step.
        if get_call_context().in_step is not None or current_binding() is not None:
            return f"<{what}>"
        if _compat.has_deleted((self._held,)):
            return f"<{what} of a deleted array>"
        held: Any = self.distributed if self._home.per_replica else np.asarray(self._held)
        return f"<{what} {held!r}>"


def _value_for_jax(variable: Variable) -> Any:
    """Return what functions of pytrees find in a variable: its value."""
    # Here and not later: JAX's own error for a Jacobian would name neither variable nor remedy.
    jacobian = _compat.find_calling_jacobian()
    if jacobian is not None:
        label = variable.label
        raise ArgumentTypeError(
            f"jax.{jacobian} was called with Variable {label!r} {variable.dtype}"
            f"{list(variable.shape)} as the argument that it differentiates.\n\n"
            "jax.jacrev, jax.jacfwd, jax.jacobian and jax.hessian put arrays into the structure "
            "of their arguments, where an array cannot replace a variable. jax.grad, "
            "jax.vjp and jax.jvp take a variable.\n\n"
            f"Pass {label if label.isidentifier() else 'variable'}.value() in its place."
        )
    try:
        return variable.value()
    except ArgumentError:
        # It has no single value across replicas. Code that only needs the structure can continue.
        return NoValue(variable)


class NoValue:
    """A placeholder for a value that does not exist across replicas; converting it raises."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._variable.value())

    def __jax_array__(self) -> jax.Array:
        return self._variable.value()


def show_value_to_jax(kind: type[Variable]) -> None:
    """Let functions of JAX get the value of the variables of a class.

    What they rebuild instead (a gradient, a mapped value) is an array, not a variable.
    """
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda v: (((jax.tree_util.GetAttrKey("value"), _value_for_jax(v)),), None),
        lambda _, values: next(iter(values)),
        lambda v: ((_value_for_jax(v),), None),
    )


show_value_to_jax(Variable)


class VariableRef:
    """A hashable reference to a variable; two references to one variable are equal."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableRef) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"


def get_arrays(variables: Sequence[Variable]) -> list[jax.Array]:
    """Return the arrays that hold the copies of these variables."""
    # Checked once, not by the property of each variable: every step calls this.
    if current_binding() is not None:
        return [v.held for v in variables]
    return [v._held if v._home.store is None else v._home.bring(v._held) for v in variables]


def check_alive(variables: Sequence[Variable]) -> None:
    """Raise if a step got the array of a variable and donated it.

    Raises:
        DonationError: The buffer of the array is gone.
    """
    for variable in variables:
        if _compat.has_deleted((variable._held,)):
            raise make_deleted_error(f"Variable {variable.name!r} was used", variable._held)


def set_arrays(variables: Sequence[Variable], arrays: Sequence[jax.Array]) -> None:
    """Store the arrays that a step returned for these variables."""
    for variable, array in zip(variables, arrays, strict=True):
        home = variable._home
        if current_binding() is not None:
            variable.held = array
        else:
            array = array if home.layout is not None else home.bring_back(array)
            variable._held = array if home.store is None else home.keep(array)


class _Process:
    """State that all variables of this process share."""

    has_variables = False


def has_any_variable() -> bool:
    """Whether this process has created any variable."""
    return _Process.has_variables


def _find_access() -> Access:
    in_step = GET_CALL_CONTEXT.call().in_step
    return ACROSS if in_step is None else in_step


def _place_variable(array: Any, layout: ReplicaMesh | None, *, on_read: bool) -> VariablePlacement:
    """Return the placement of a variable that starts as `array`.

    An array that is sharded over the logical axes keeps its sharding.
    """
    shape = tuple(array.shape)
    if layout is None:
        return VariablePlacement(None, None, False, shape, array.dtype)
    call_as("A Variable", layout.check_can_run)
    # With one replica there is one copy, so nothing has to be combined at a read.
    # Central storage also has one copy; TensorFlow combines what replicas assign to it.
    per_replica = on_read and layout.num_replicas > 1 and layout.variables_on is None
    found = placement_of(array, layout)
    sharding = found.sharding if found.kind is Kind.MIRRORED else layout.replicated
    if per_replica:
        sharding = layout.per_replica
    return VariablePlacement(layout, sharding, per_replica, shape, array.dtype)
