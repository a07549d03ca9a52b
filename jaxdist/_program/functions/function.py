"""`jaxdist.function`: a function that JAX compiles as a whole, with the variables it uses."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._devices import CPU_STEPS
from jaxdist._program.arguments.arguments import (
    Flat,
    check_call,
    check_no_arrays_hidden,
    flatten,
)
from jaxdist._program.arguments.compiler_options import refuse_option
from jaxdist._program.arguments.exact import exact_structure
from jaxdist._program.arguments.opaque import check_step_holds_no_arrays
from jaxdist._program.arguments.options import check_names, find_static_numbers
from jaxdist._program.functions.draws import (
    Draws,
    FunctionCall,
    UnevenBatchError,
    current_draws,
    is_uneven,
    serve,
    shapes_of,
    take_iterators_out,
)
from jaxdist._program.functions.errors import find_invalid_operation, mixed_devices_error
from jaxdist._program.functions.trace import FlatResult, FunctionTrace, trace_function
from jaxdist._program.nnx.graph import GraphCache
from jaxdist._program.op_by_op import EAGERLY
from jaxdist._replica import HasLayout, current_frame
from jaxdist._validate import check_callable
from jaxdist._values import (
    Variable,
    as_held,
    as_sharded,
    check_alive,
    copy_writable_leaves,
    current_binding,
    get_arrays,
    make_deleted_error,
    set_arrays,
)


class _OtherInputsError(BaseException):
    """A trace for other shapes used other variables or batches. Internal.

    It is not an `Exception`, so that `except Exception` in a user's function does not catch it.
    """

    def __init__(self, found: FunctionTrace) -> None:
        self.found = found


@dataclasses.dataclass(eq=False)
class _CompiledFunction:
    """The compiled function for one structure of arguments, with the variables that it uses."""

    variables: tuple[Variable, ...]
    options: dict[str, Any] | None  # compile options that a step in it needs
    # A trace that `jax.jit` has not used yet.
    found: FunctionTrace | None
    call: Any = None  # the jitted function
    gives_padding: bool = False  # whether results contain padded arrays, as `HeldPieces`


class Function:
    """A Python function that `jaxdist.function` compiles as a whole."""

    @called("jaxdist.function")
    def __init__(self, fn: Callable[..., Any], static_argnames: Sequence[str]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        names = check_names(static_argnames)
        self._static_names = frozenset(names)
        self._static_numbers = find_static_numbers(fn, names)
        self._known: dict[Any, _CompiledFunction] = {}
        self._counts: dict[Any, tuple[int, ...]] = {}  # the number of batches that a call takes
        self._graphs = GraphCache()
        self._is_exact: dict[Any, bool] = {}
        self._num_traces = 0

    @property
    def python_function(self) -> Callable[..., Any]:
        """The original Python function."""
        return self._fn

    @property
    def static_arguments(self) -> tuple[frozenset[str], frozenset[int]]:
        """Names and positions of the arguments that are static as a whole."""
        return self._static_names, self._static_numbers

    def experimental_get_tracing_count(self) -> int:
        """Return how often the function was traced: once for each structure, shape and dtype.

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

    @called("jaxdist.function")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        inside = frame is not None and frame.is_inside_step
        if EAGERLY or inside or current_binding() is not None or _compat.must_interpret():
            return self._call_python(args, kwargs)
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        # A compiled function needs one shape for all replicas. A step called from Python does not.
        if any(is_uneven(leaf) for leaf in flat.dynamic):
            return self._call_python(args, kwargs)
        check_call(flat, args, kwargs)
        flat, draws = take_iterators_out(getattr(self._fn, "__name__", "function"), flat)
        try:
            return self._run(flat, draws, None if frame is None else frame.strategy)
        except UnevenBatchError:
            draws.put_back()
        # Also KeyboardInterrupt: the batches must return to their iterators.
        except BaseException as error:
            better: Exception | None = None
            # Before `put_back`, because the search for a nan needs the batches.
            try:
                better = self._improve_error(error, flat, draws)
            finally:
                draws.put_back()
            _compat.hide_frames(error)
            if better is not None:
                _compat.hide_frames(better)
                raise better from error
            raise
        try:
            return self._call_python(args, kwargs)
        except StopIteration as error:
            # Callers wait for the same error, whether the last batch is uneven or not.
            raise draws.make_ended_error() from error

    def _call_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _compat.check_constants(traces_anew=_compat.is_inside_trace()):
            return self._fn(*args, **kwargs)

    def _improve_error(self, error: BaseException, flat: Flat, draws: Draws) -> Exception | None:
        """Return a better error for a call that failed, or None."""
        if isinstance(error, jax.errors.UnexpectedTracerError):
            cached_graph = self._graphs.of(flat)
            return None if cached_graph is None else cached_graph.find_leak()
        if isinstance(error, FloatingPointError) and _compat.is_checking_numbers():
            return find_invalid_operation(self._fn, flat, self._graphs.of(flat), draws, error)
        return mixed_devices_error(getattr(self._fn, "__name__", "function"), error)

    @_compat.outside_of_meshes
    @called("jaxdist.function")
    def _run(self, flat: Flat, draws: Draws, strategy: HasLayout | None) -> Any:
        cached_graph = self._graphs.of(flat)
        state = cached_graph.read() if cached_graph else []
        # See Note [Who owns host memory]
        # One by one: a batch without NumPy arrays stays the same object, which knows the batches
        # that come; see Note [Batches to come].
        flat.dynamic[:] = map(copy_writable_leaves, as_held(flat.dynamic))
        state = [copy_writable_leaves(x) for x in as_held(state)]
        given = FunctionCall(flat, cached_graph, draws)
        # Whether `exact_structure` is None is cached.
        may_differ = self._is_exact.get(flat.treedef, True)
        structure = exact_structure(flat.treedef) if may_differ else None
        self._is_exact[flat.treedef] = structure is not None
        key: Any = (flat.treedef, structure, flat.slots, given.shape, strategy)
        if draws.counts:
            # The number of batches may depend on the shapes of all arguments.
            key = (*key, shapes_of(flat.dynamic))
            draws.take(self._counts.get(key, ()))
        compiled = self._known.get((key, given.placements()))
        if compiled is None:
            check_no_arrays_hidden(flat)
            check_step_holds_no_arrays(self._fn)
            with serve(draws):
                found = self._trace(given, state, flat.dynamic)
            compiled = self._build(given, key, found, ())
        self._check_alive(flat, cached_graph, state)
        while True:
            check_alive(compiled.variables)
            CPU_STEPS.make_room()
            try:
                with serve(draws):
                    results = compiled.call(
                        get_arrays(compiled.variables), state, flat.dynamic, draws.batches
                    )
                break
            except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
                asked_options = tuple((compiled.options or {}).items())
                name = getattr(self._fn, "__name__", "function")
                steps = f"A step in the jaxdist.function {name}"
                better = refuse_option(error, asked_options, steps)
                if better is None:
                    raise
                raise better from error
            except _OtherInputsError as error:
                # With other shapes the function used other variables, or more batches.
                compiled = self._build(given, key, error.found, compiled.variables)
        CPU_STEPS.count_step(results)
        if isinstance(results[2], FlatResult):
            results = (*results[:2], results[2].open())
        variables, after, result = as_sharded(results) if compiled.gives_padding else results
        try:
            if cached_graph is not None:
                cached_graph.write(after)
        finally:
            written = [compiled.variables[i] for i in sorted(variables)]
            set_arrays(written, [variables[i] for i in sorted(variables)])
        return result

    def _check_alive(self, flat: Flat, cached_graph: Any, state: Sequence[Any]) -> None:
        """Raise if an argument is deleted; see `make_deleted_error`."""
        held = jax.tree.leaves((state, flat.dynamic))
        if not _compat.has_deleted(held):
            return
        named = [(cached_graph.shape.name(i), x) for i, x in enumerate(state)]
        named += [(flat.name(i), x) for i, x in enumerate(flat.dynamic)]
        arrays = ((name, x) for name, leaf in named for x in jax.tree.leaves(leaf))
        name, array = next((n, x) for n, x in arrays if _compat.has_deleted((x,)))
        what = f"jaxdist.function {getattr(self._fn, '__name__', 'function')} was given {name}"
        raise make_deleted_error(what, array)

    def _build(
        self, given: FunctionCall, key: Any, found: FunctionTrace, before: tuple[Variable, ...]
    ) -> _CompiledFunction:
        """Build the compiled function, with all variables and batches of a trace as inputs."""
        # Before `given.placements()`, which contains the batches.
        given.draws.give_back_unused()
        known = set(map(id, before))
        variables = (*before, *(v for v in found.variables if id(v) not in known))
        compiled = _CompiledFunction(variables, found.options, found)
        compiled.call = self._jit(compiled, given)
        self._counts[key] = given.draws.counts
        self._known[(key, given.placements())] = compiled
        return compiled

    def _trace(self, given: FunctionCall, state: Any, dynamic: Any) -> FunctionTrace:
        """Trace the Python function once, on values of these shapes."""
        self._num_traces += 1
        return trace_function(self._fn, given, current_draws(), state, dynamic)

    def _jit(self, compiled: _CompiledFunction, given: FunctionCall) -> Any:
        def traced(
            values: list[Any], state: list[Any], dynamic: list[Any], batches: list[list[Any]]
        ) -> Any:
            found, compiled.found = compiled.found, None
            if found is None or not found.fits(state, dynamic):
                found = self._trace(given, state, dynamic)
            # `jax.jit` traces again for other shapes, and then the inputs may not fit any more.
            known = {id(v) for v in compiled.variables}
            counts = tuple(map(len, batches))
            if (
                any(id(v) not in known for v in found.variables)
                or found.options not in (None, compiled.options)
                or found.counts != counts
            ):
                raise _OtherInputsError(found)
            compiled.gives_padding = compiled.gives_padding or found.gives_padding
            return found.replay(compiled.variables, values, state, dynamic, batches)

        traced.__name__ = getattr(self._fn, "__name__", "function")
        jitted = jax.jit(traced, compiler_options=compiled.options)
        if compiled.options is None:
            return jitted

        # The partitioner is chosen when JAX lowers the function, so at the calls and not here.
        def call_exactly(*args: Any) -> Any:
            with _compat.use_exact_partitioner(compiled.options):
                return jitted(*args)

        return call_exactly


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

    The function reads and assigns `Variable`s as if it were not compiled. It may call
    `strategy.run`, `reduce` and `gather`, and it updates NNX objects that are arguments in place.
    Everything in it is one program with one dispatch. The Python function itself runs inside a
    step, inside another such function, with uneven per-replica values, and under
    `config.run_eagerly`.

    A `DistributedIterator` may be an argument. In the function, `next(iterator)` and
    `iterator.get_next()` take new batches at each call, as many as in the trace. The batches are
    taken before the program starts. If the call fails, they return to the iterator.

    Shapes:
        The layout of an argument has the same meaning as outside. If it is laid out over the
        replicas, each replica gets its rows. An array that the function computes goes whole to
        each replica.

    Cost:
        A trace and a compilation for each new structure, shape or dtype of the arguments. Then
        one dispatch.

    Args:
        func: The function. As for `Strategy.run`, numbers and arrays among its arguments are
            traced. Booleans, strings and other objects are static.
        static_argnames: Names of parameters whose numbers are static instead of traced.

    Returns:
        The compiled function, or a decorator if `func` is left out.

    Raises:
        ArgumentTypeError: `func` is not callable, or returns an NNX object.
        ContextError: The function creates a variable, or takes batches of an iterator that is not
            an argument.
        MixedStrategyError: Steps, variables or arrays in it are on different devices.
        OutOfRangeError: The function takes more batches than its iterator has left.

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

    @called("jaxdist.function")
    def decorate(fn: Callable[..., Any]) -> Function:
        check_callable(fn, "func")
        return Function(fn, static_argnames)

    return decorate if func is None else decorate(func)
