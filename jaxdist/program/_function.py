"""A function that JAX compiles as a whole, with the variables that it uses."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
from flax import nnx

from jaxdist import _compat
from jaxdist._validate import is_callable
from jaxdist.errors import ArgumentTypeError, ContextError
from jaxdist.program import _captured
from jaxdist.program._arguments import (
    Flat,
    Static,
    VariableItself,
    check_hashable,
    check_no_arrays_hidden,
    check_no_bare_variable,
    check_not_leaked,
    flatten,
    unflatten,
)
from jaxdist.program._bound_variables import BoundVariables
from jaxdist.program._draws import (
    Draws,
    UnevenBatchError,
    current_draws,
    is_uneven,
    serving,
    shapes_of,
    taken_out,
)
from jaxdist.program._eagerly import EAGERLY
from jaxdist.program._exact import exact_structure
from jaxdist.program._function_call import FunctionCall
from jaxdist.program._kept_graphs import KeptGraphs
from jaxdist.program._options import static_numbers
from jaxdist.program._trace import check_result, not_a_result, opened_result
from jaxdist.replica import current_frame
from jaxdist.runtime import CPU_STEPS
from jaxdist.values import (
    Variable,
    bound,
    current_binding,
    held_by,
    hold_all,
    owned_leaves,
    rebuild_on_unflatten,
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
        self._counts: dict[Any, tuple[int, ...]] = {}  # batches that a call takes
        self._kept = KeptGraphs()
        self._is_exact: dict[Any, bool] = {}
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
        # One compiled function has one shape for all replicas; a step in it need not.
        if any(is_uneven(leaf) for leaf in flat.dynamic):
            return self._fn(*args, **kwargs)
        check_hashable("jaxdist.function", flat)
        check_not_leaked("jaxdist.function", flat)
        check_no_bare_variable("jaxdist.function", args, kwargs)
        flat, draws = taken_out(getattr(self._fn, "__name__", "function"), flat)
        try:
            return self._run(flat, draws, None if frame is None else frame.strategy)
        except UnevenBatchError:
            draws.put_back()
        except BaseException as error:
            draws.put_back()
            _compat.hide_frames(error)
            raise
        return self._fn(*args, **kwargs)

    def _run(self, flat: Flat, draws: Draws, strategy: Any) -> Any:
        kept = self._kept.of(flat)
        shape = kept.shape if kept else None
        state = kept.read() if kept else []
        # See Note [Who owns host memory]
        flat.dynamic[:] = owned_leaves(flat.dynamic)
        state = owned_leaves(state)
        asked: Any = (flat.treedef, self._structure(flat.treedef), flat.slots, shape, strategy)
        if draws.counts:
            # How many batches it takes may depend on the shapes of all arguments.
            asked = (*asked, shapes_of(flat.dynamic))
            draws.take(self._counts.get(asked, ()))
        given = FunctionCall(flat, shape, state, draws)
        compiled = self._known.get((asked, given.key()))
        if compiled is None:
            compiled = self._settled(given, asked, ())
        while True:
            CPU_STEPS.make_room()
            held, counts = held_by(compiled.variables), draws.counts
            with serving(draws):
                results = compiled.call(held, state, flat.dynamic, draws.batches)
            if not compiled.unknown and draws.counts == counts:
                break
            # Other shapes led to other variables, or to more batches.
            compiled = self._settled(given, asked, compiled.all_variables)
        CPU_STEPS.dispatched(results)
        variables, after, result = results
        try:
            if kept is not None:
                kept.write(after)
        finally:
            written = [compiled.variables[i] for i in sorted(variables)]
            hold_all(written, [variables[i] for i in sorted(variables)])
        return result

    def _structure(self, treedef: Any) -> Any:
        """`exact_structure`; whether there is one is asked once for structures that are equal."""
        found = exact_structure(treedef) if self._is_exact.get(treedef, True) else None
        self._is_exact[treedef] = found is not None
        return found

    def _settled(
        self, given: FunctionCall, asked: Any, variables: tuple[Variable, ...]
    ) -> _Compiled:
        """The function with all the variables and batches that it meets as inputs."""
        check_no_arrays_hidden("jaxdist.function", given.flat)
        options, draws = None, given.draws
        for _ in range(MAX_TRACES):
            compiled = _Compiled(variables, options=options)
            compiled.call = self._jitted(compiled, given)
            before = draws.counts
            # More may be taken while it is traced.
            batches = [list(b) for b in draws.batches]
            with serving(draws):
                compiled.call.trace(held_by(variables), given.state, given.flat.dynamic, batches)
            draws.give_back_unused()
            if not compiled.unknown and compiled.options == options and draws.counts == before:
                self._counts[asked] = draws.counts
                self._known[(asked, given.key())] = compiled
                return compiled
            variables, options = compiled.all_variables, compiled.options
        met = f"another variable every time; last {variables[-1].label!r}" if variables else ""
        raise ContextError(
            f"{self!r} was traced {MAX_TRACES} times, and met "
            f"{met or 'another number of batches every time'}.\n\n"
            "Which variables and how many batches a function uses is part of what is compiled.\n\n"
            "Choose them by an argument, not by state that changes from call to call."
        )

    def _jitted(self, compiled: _Compiled, given: FunctionCall) -> Any:
        treedef, slots, shape = given.flat.treedef, given.flat.slots, given.shape
        origins = given.origins()

        def traced(
            values: list[Any], state: list[Any], dynamic: list[Any], batches: list[list[Any]]
        ) -> Any:
            self._num_traces += 1
            draws = current_draws()
            arguments = jax.tree.leaves((dynamic, batches))
            binding = BoundVariables(compiled.variables, values, arguments, origins, draws, batches)
            nodes = shape.merge(state) if shape is not None else ()
            args, kwargs = unflatten(treedef, draws.in_place(slots), dynamic, nodes)
            with bound(binding):
                result = _captured.call(self._fn, args, kwargs)
            compiled.unknown += binding.unknown
            compiled.options = compiled.options or binding.compiler_options
            after = shape.leaves_of(nodes) if shape is not None else []
            return binding.written(), after, _checked(result)

        traced.__name__ = getattr(self._fn, "__name__", "function")
        return jax.jit(traced, compiler_options=compiled.options)


def _checked(result: Any) -> Any:
    """The result with what is no array kept as it is."""

    result = opened_result(result, _is_whole)

    def keep(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, (nnx.Module, nnx.Optimizer)):
            name = "result" + jax.tree_util.keystr(path)
            raise ArgumentTypeError(not_a_result(name, leaf, "The function"))
        if isinstance(leaf, Variable):
            return VariableItself(leaf)
        if hasattr(leaf, "dtype"):
            return leaf
        check_result("The function", "result" + jax.tree_util.keystr(path), leaf)
        return Static(leaf)

    return rebuild_on_unflatten(
        jax.tree_util.tree_map_with_path(keep, result, is_leaf=_is_whole), Static
    )


def _is_whole(x: Any) -> bool:
    return isinstance(x, (nnx.Module, nnx.Optimizer, Variable, Iterator))


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

    A `DistributedIterator` may be an argument: `next(iterator)` and `iterator.get_next()` in the
    function take new batches at each call, as many as when it was traced. They are taken before
    the program starts, and go back where the call fails.

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
        ContextError: A variable is made in it, it meets other variables at every trace, or it
            takes batches of an iterator that is not an argument.
        OutOfRangeError: It takes more batches than its iterator has left.

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
