"""A function that JAX compiles as a whole, with the variables that it uses."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._validate import is_callable
from jaxdist.errors import ArgumentTypeError, ContextError
from jaxdist.program import _captured
from jaxdist.program._arguments import (
    Flat,
    Static,
    VariableItself,
    check_hashable,
    check_no_bare_variable,
    flatten,
    unflatten,
)
from jaxdist.program._bound_variables import BoundVariables
from jaxdist.program._eagerly import EAGERLY
from jaxdist.program._kept_graphs import KeptGraphs
from jaxdist.program._options import static_numbers
from jaxdist.program._trace import not_a_result
from jaxdist.replica import current_frame
from jaxdist.runtime import CPU_STEPS
from jaxdist.values import (
    Origin,
    PerReplica,
    Variable,
    bound,
    current_binding,
    held_by,
    hold_all,
)

MAX_TRACES = 8


@dataclasses.dataclass(eq=False)
class _Compiled:
    """The function for one structure of arguments, with the variables that it uses."""

    variables: tuple[Variable, ...]
    # Others that a trace of it met; it is compiled again with them.
    unknown: list[Variable] = dataclasses.field(default_factory=list)
    # Compile options that a step in it needs.
    options: dict[str, Any] | None = None
    call: Any = None  # what `jax.jit` makes

    @property
    def all_variables(self) -> tuple[Variable, ...]:
        """The variables, with those that were met."""
        return (*self.variables, *self.unknown)


class Function:
    """What `jaxdist.function` makes of a Python function."""

    def __init__(self, fn: Callable[..., Any], static_argnames: Sequence[str]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._static_names = frozenset(static_argnames)
        self._static_numbers = static_numbers(fn, tuple(static_argnames))
        self._known: dict[Any, _Compiled] = {}
        self._kept = KeptGraphs()
        self._num_traces = 0

    @property
    def python_function(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._fn

    def experimental_get_tracing_count(self) -> int:
        """How often the function was traced: once for each structure, shape and dtype.

        Example:
            >>> double = jaxdist.function(lambda x: 2 * x)
            >>> [float(double(x)) for x in (1.0, 2.0)], double.experimental_get_tracing_count()
            ([2.0, 4.0], 1)
        """
        return self._num_traces

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<jaxdist.function {getattr(self._fn, '__qualname__', self._fn)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        inside = frame is not None and frame.inside_step
        if EAGERLY or inside or current_binding() is not None or _compat.must_interpret():
            return self._fn(*args, **kwargs)
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        if any(_is_uneven(leaf) for leaf in flat.dynamic):
            # One compiled function has one shape for all replicas; a step in it need not.
            return self._fn(*args, **kwargs)
        check_hashable("jaxdist.function", flat)
        check_no_bare_variable("jaxdist.function", args, kwargs)
        kept = self._kept.of(flat)
        strategy = None if frame is None else frame.strategy
        shape = kept.shape if kept else None
        origins = tuple(map(_origin, jax.tree.leaves(flat.dynamic)))
        key = (flat.treedef, flat.slots, shape, strategy, origins)
        state = kept.read() if kept else []
        compiled = self._known.get(key)
        if compiled is None:
            compiled = self._known[key] = self._settled(flat, shape, state, origins, ())
        while True:
            CPU_STEPS.make_room()
            results = compiled.call(held_by(compiled.variables), state, flat.dynamic)
            if not compiled.unknown:
                break
            # Other shapes led to other variables.
            compiled = self._settled(flat, shape, state, origins, compiled.all_variables)
            self._known[key] = compiled
        CPU_STEPS.dispatched(results)
        variables, after, result = results
        try:
            if kept is not None:
                kept.write(after)
        finally:
            written = [compiled.variables[i] for i in sorted(variables)]
            hold_all(written, [variables[i] for i in sorted(variables)])
        return result

    def _settled(
        self,
        flat: Flat,
        shape: Any,
        state: Sequence[Any],
        origins: tuple[Origin, ...],
        variables: tuple[Variable, ...],
    ) -> _Compiled:
        """The function with all the variables that it meets as inputs."""
        options = None
        for _ in range(MAX_TRACES):
            compiled = _Compiled(variables, options=options)
            compiled.call = self._jitted(compiled, flat, shape, origins)
            compiled.call.trace(held_by(variables), state, flat.dynamic)
            if not compiled.unknown and compiled.options == options:
                return compiled
            variables, options = compiled.all_variables, compiled.options
        raise ContextError(
            f"{self!r} was traced {MAX_TRACES} times, and met another variable every time; last "
            f"{variables[-1].label!r}.\n\n"
            "Which variables a function uses is part of what is compiled.\n\n"
            "Choose them by an argument, not by state that changes from call to call."
        )

    def _jitted(
        self, compiled: _Compiled, flat: Flat, shape: Any, origins: tuple[Origin, ...]
    ) -> Any:
        treedef, slots = flat.treedef, flat.slots

        def traced(values: list[Any], state: list[Any], dynamic: list[Any]) -> Any:
            self._num_traces += 1
            arguments = jax.tree.leaves(dynamic)
            binding = BoundVariables(compiled.variables, values, arguments, origins)
            nodes = shape.merge(state) if shape is not None else ()
            args, kwargs = unflatten(treedef, slots, dynamic, nodes)
            with bound(binding):
                result = _captured.call(self._fn, args, kwargs)
            compiled.unknown += binding.unknown
            compiled.options = compiled.options or binding.compiler_options
            after = shape.leaves_of(nodes) if shape is not None else []
            return binding.written(), after, _checked(result)

        traced.__name__ = getattr(self._fn, "__name__", "function")
        return jax.jit(traced, compiler_options=compiled.options)


def _origin(leaf: Any) -> Origin:
    if not isinstance(leaf, jax.Array):
        return _NOWHERE
    if len(leaf.sharding.device_set) == 1 and not _names_axes(leaf.sharding):
        return _ON_ONE_DEVICE
    return Origin(leaf.sharding, _compat.is_committed(leaf))


def _names_axes(sharding: Any) -> bool:
    """Whether a layout says over which axes; virtual replicas share even one device."""
    return isinstance(sharding, NamedSharding) and any(sharding.spec)


_NOWHERE = Origin(None, False)
_ON_ONE_DEVICE = Origin(None, True)


def _is_uneven(leaf: Any) -> bool:
    if not isinstance(leaf, PerReplica) or leaf.is_global:
        return False
    return len({jax.numpy.shape(v) for v in leaf.values}) > 1


def _checked(result: Any) -> Any:
    """The result with what is no array kept as it is."""

    def keep(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, (nnx.Module, nnx.Optimizer)):
            name = "result" + jax.tree_util.keystr(path)
            raise ArgumentTypeError(not_a_result(name, leaf, "The function"))
        if isinstance(leaf, Variable):
            return VariableItself(leaf)
        return leaf if hasattr(leaf, "dtype") else Static(leaf)

    return jax.tree_util.tree_map_with_path(
        keep, result, is_leaf=lambda x: isinstance(x, (nnx.Module, nnx.Optimizer, Variable))
    )


@overload
def function(func: Callable[..., Any], *, static_argnames: Sequence[str] = ...) -> Function: ...


@overload
def function(
    func: None = ..., *, static_argnames: Sequence[str] = ...
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    func: Callable[..., Any] | None = None, *, static_argnames: Sequence[str] = ()
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Compile a function as a whole: `jax.jit` for functions that use variables.

    It reads and assigns `Variable`s as if it were not compiled, may call `strategy.run`,
    `reduce` and `gather`, and updates NNX objects that are arguments in place. Everything in it
    is one program with one dispatch. Inside a step, inside another such function, with uneven
    per-replica values, and under `config.run_eagerly` it is the Python function itself.

    Shapes:
        Arguments mean what their layouts say, as outside: laid out over the replicas, each
        replica gets its rows. An array that is computed in the function is whole for each.

    Cost:
        A trace and a compilation for each new structure, shape or dtype of the arguments; one
        trace more for the first call that meets variables. Then one dispatch.

    Args:
        func: The function. Booleans, strings and other objects among its arguments are part of
            the program, numbers and arrays are traced, as for `Strategy.run`.
        static_argnames: Numbers that are part of the program, by the names of their parameters.

    Returns:
        The compiled function, or a decorator where `func` is left out.

    Raises:
        ArgumentTypeError: `func` is not callable, or returns an NNX object.
        ContextError: A variable is made in it, data are read in it, or it meets other variables
            at every trace.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     seen = Variable(0, name="seen")
        >>> @jaxdist.function
        ... def train_step(x):
        ...     losses = strategy.run(lambda x: x * x, (x,))
        ...     seen.assign_add(1)
        ...     return strategy.reduce("MEAN", losses, axis=None)
        >>> x = strategy.run(lambda x: x, (PerReplica([1.0, 3.0]),))
        >>> float(train_step(x)), int(seen)
        (5.0, 1)

    Source:
        `tf.function`; `jax.jit`.
    """

    def decorated(fn: Callable[..., Any]) -> Function:
        is_callable("jaxdist.function", fn)
        return Function(fn, static_argnames)

    return decorated if func is None else decorated(func)
