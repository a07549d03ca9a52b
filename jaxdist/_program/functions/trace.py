"""Traces a compiled function once; `jax.jit` then makes a program of the trace."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._integers import check_fits
from jaxdist._program.arguments.arguments import Static, VariableItself, unflatten
from jaxdist._program.arguments.opaque import ITERABLE_LEAVES
from jaxdist._program.functions.bound_variables import BatchLeaf, BoundVariables
from jaxdist._program.functions.draws import Draws, FunctionCall, origins_of
from jaxdist._program.jaxprs.primitives import PLACEHOLDER
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist._program.nnx import closures
from jaxdist._program.trace.step_errors import check_operands, explain_row_numbers
from jaxdist._program.trace.trace import check_result, open_result, refused_result_message
from jaxdist._values import (
    Assignable,
    Stop,
    Variable,
    as_held,
    as_sharded,
    copy_steps_ahead,
    has_padding,
    is_leaked,
    rebuild_on_unflatten,
    refuse_ref,
    stops,
    use_binding,
)
from jaxdist.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionTrace:
    """The function for arguments of one shape, with variables and batches as further inputs."""

    closed: ClosedJaxpr  # of the flat arguments, then `inputs`; flat results
    inputs: tuple[Variable | BatchLeaf, ...]
    variables: tuple[Variable, ...]  # the variables that it read or assigned
    written: tuple[int, ...]  # assigned variables by `id`; their new arrays are the first results
    treedef: Any  # the structure of the other results
    options: dict[str, Any] | None  # compile options that a step in it needs
    counts: tuple[int, ...]  # the number of batches that it took from each iterator
    kinds: Any  # shapes and dtypes of the arguments
    gives_padding: bool  # whether results contain padded arrays, as `HeldPieces`

    def fits(self, state: Any, dynamic: Any) -> bool:
        """Whether the trace is for values of these shapes and dtypes."""
        return bool(self.kinds == _shapes_and_dtypes(state, dynamic))

    def replay(
        self,
        variables: Sequence[Variable],
        values: Sequence[Any],
        state: Any,
        dynamic: Any,
        batches: Sequence[Sequence[Any]],
    ) -> tuple[dict[int, Any], Any, Any]:
        """Run the traced function, usually inside of another trace.

        Returns:
            The new arrays of variables, by their position in `variables`; the new state of NNX
            objects; and the function's result, as a `FlatResult` if it contains variables.
        """
        own = {id(v): value for v, value in zip(variables, values, strict=True)}
        met = [i.of(batches) if isinstance(i, BatchLeaf) else own[id(i)] for i in self.inputs]
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves((state, dynamic)), *met)
        place = {id(v): n for n, v in enumerate(variables)}
        count = len(self.written)
        after, result = self.treedef.unflatten(results[count:])
        arrays = dict(zip((place[i] for i in self.written), results[:count], strict=True))
        # `unflatten` turned each `Static` into its bare value, which `jax.jit` cannot return.
        return arrays, after, flatten_with_variables(_check_result(result))


def trace_function(
    fn: Callable[..., Any],
    given: FunctionCall,
    draws: Draws,
    state: Any,
    dynamic: Any,
    replace_in: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    read: Callable[[Any], Any] = lambda leaf: leaf,
) -> FunctionTrace:
    """Trace `fn` once, on values with the shapes of `state` and `dynamic`.

    Args:
        fn: The function.
        given: Its call.
        draws: The batches that it takes.
        state: The values of the variables of its NNX objects.
        dynamic: Its arguments that are arrays.
        replace_in: Replaces attributes of the NNX objects while `fn` runs.
        read: Maps each leaf of the result of `fn` to the value to return.
    """
    shape, slots = given.shape, given.flat.slots
    origins = origins_of(given.flat.dynamic)
    # The traced function can return only arrays, so it leaves everything else here.
    made: list[Any] = []

    @_compat.check_constants(traces_anew=True)
    def traced(state: Any, dynamic: Any) -> list[Any]:
        binding = BoundVariables(jax.tree.leaves(dynamic), origins, draws)
        copy_steps_ahead(given.flat.dynamic, dynamic)
        state, dynamic = as_sharded((state, dynamic))
        nodes = shape.merge(state) if shape is not None else ()
        args, kwargs = unflatten(given.flat.treedef, draws.insert_iterators(slots), dynamic, nodes)
        with use_binding(binding):
            bare = closures.find_bare_variables(args, kwargs)
            with closures.explain_errors(fn), explain_row_numbers(), replace_in(nodes):
                result = fn(*args, **kwargs)
            closures.check_no_write_is_lost(bare, result)
            # A variable can be read only here. An array in pieces keeps its padding.
            opened = open_result(result, _is_read_whole)
            for path, leaf in jax.tree.leaves_with_path(opened, is_leaf=_is_read_whole):
                if isinstance(leaf, ITERABLE_LEAVES):
                    check_result("The function", "result" + jax.tree_util.keystr(path), leaf)
            result = jax.tree.map(read, opened, is_leaf=_is_read_whole)
        after = shape.values_of(nodes) if shape is not None else []
        written = binding.collect_written()
        held, gives_padding = as_held((after, result)), has_padding((after, result))
        leaves, treedef = jax.tree.flatten((held[0], _check_result(held[1])))
        made[:] = binding, tuple(written), treedef, gives_padding
        return [*written.values(), *leaves]

    closed = jax.make_jaxpr(traced)(state, dynamic)
    for eqn in iterate_equations(closed.jaxpr):
        operands = [x.aval for x in eqn.invars]
        check_operands(eqn.primitive.name, operands, functools.partial(_compat.find_source, eqn))
    dead = next((c for c in closed.consts if is_leaked(c)), None)
    if dead is not None:
        raise closures.leak_error(fn, dead)
    binding, written, treedef, gives_padding = made
    jaxpr, marks = _compat.remove_placeholders(closed, PLACEHOLDER)
    jaxpr = _compat.append_inputs(jaxpr, [marks[n] for n in range(len(binding.inputs))])
    return FunctionTrace(
        ClosedJaxpr(jaxpr, closed.consts),
        tuple(binding.inputs),
        binding.variables,
        written,
        treedef,
        binding.compiler_options,
        tuple(draws.used),
        _shapes_and_dtypes(state, dynamic),
        gives_padding,
    )


def _shapes_and_dtypes(state: Any, dynamic: Any) -> list[Any]:
    avals = [jax.typeof(x) for x in jax.tree.leaves((state, dynamic))]
    return [(a.shape, a.dtype, a.weak_type) for a in avals]


def _check_result(result: Any) -> Any:
    """Check a result, and wrap everything in it that is not an array."""

    result = open_result(result, _is_whole)

    @called("The function")
    def keep(path: Any, leaf: Any) -> Any:
        name = "result" + jax.tree_util.keystr(path)
        refuse_ref(f"The function returned {name}", leaf)
        if isinstance(leaf, (nnx.Module, nnx.Optimizer)):
            raise ArgumentTypeError(refused_result_message(name, leaf, "The function"))
        if isinstance(leaf, Assignable):
            return VariableItself(leaf)
        # Classes such as `jnp.float32` have a dtype too.
        if hasattr(leaf, "dtype") and not isinstance(leaf, type):
            check_fits(name, leaf)
            return leaf
        check_result("The function", name, leaf)
        return Static(leaf)

    return rebuild_on_unflatten(
        jax.tree_util.tree_map_with_path(keep, result, is_leaf=_is_whole), Static
    )


_is_read_whole = stops(Stop.ARGUMENTS, Static, *ITERABLE_LEAVES)
_is_whole = stops(Stop.RESULTS_OF_FUNCTIONS, *ITERABLE_LEAVES)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatResult:
    """The arrays of a result that contains variables, and its structure.

    From the second call on, JAX flattens a result to learn its structure. A variable is a pytree
    with one leaf, its value, which is not a result of the program.
    """

    arrays: tuple[Any, ...]
    structure: Any

    def open(self) -> Any:
        """Return the result as the function returned it."""
        return self.structure.unflatten(self.arrays)


jax.tree_util.register_pytree_node(
    FlatResult, lambda r: (r.arrays, r.structure), lambda s, arrays: FlatResult(tuple(arrays), s)
)


def flatten_with_variables(result: Any) -> Any:
    """Return a `FlatResult` if a checked result contains variables; else the result itself."""
    leaves = jax.tree.leaves(result, is_leaf=_is_variable)
    if not any(map(_is_variable, leaves)):
        return result
    arrays, structure = jax.tree.flatten(result)
    return FlatResult(tuple(arrays), structure)


def _is_variable(x: Any) -> bool:
    return isinstance(x, VariableItself)
