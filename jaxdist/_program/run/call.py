"""One call of a step: its signature, its input arrays, and the mesh of a trace around it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._integers import check_fits, has_unfit
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Flat
from jaxdist._program.arguments.exact import exact_structure
from jaxdist._program.arguments.in_slot import make_in_slot, must_move
from jaxdist._program.compile.program import Program
from jaxdist._program.nnx.graph import CachedGraph
from jaxdist._program.trace.trace import Signature
from jaxdist._program.uneven.uneven import padded, uneven_shapes
from jaxdist._program.variables.lift import LiftedVariables
from jaxdist._program.virtual import not_differentiable
from jaxdist._values import (
    Kind,
    PerReplica,
    Sharded,
    array_of,
    check_virtual_rows,
    copy_if_writable,
    current_binding,
    place_per_replica,
    place_sharded,
    put,
    take_own,
    view_auto,
)
from jaxdist.errors import ContextError, ShapeError


@dataclasses.dataclass
class Call:
    """One call, flattened and checked against the strategy."""

    flat: Flat
    signature: Signature
    leaves: list[Any]
    cached_graph: CachedGraph | None
    moved: bool  # some leaf is another array than the one in the call
    has_padding: bool  # some `Sharded` array is padded

    @property
    def is_traced(self) -> bool:
        """Whether an enclosing function is being traced, so that nothing can be compiled."""
        return self.flat.has_tracer or _compat.is_inside_trace()

    def leaves_of(self, program: Program) -> Sequence[Any]:
        """Return the inputs of the program: the leaves and the variables that it uses."""
        variables = program.variables
        return variables.insert_into(self.leaves) if variables else self.leaves

    def update_state(self, program: Program, results: Sequence[Any]) -> Any:
        """Update the state with the results, and return the step's result."""
        return update_state(program.rebuild(results), self.cached_graph, program.variables)


def update_state(rebuilt: Any, cached_graph: CachedGraph | None, variables: LiftedVariables) -> Any:
    """Update the state with the rebuilt results of a program, and return the step's result."""
    if cached_graph is None and not variables.written:
        return rebuilt
    state, result = rebuilt
    # Even if the first assignment is interrupted, the variables get their new values.
    try:
        if cached_graph is not None:
            cached_graph.write(state[: variables.after] if variables.written else state)
    finally:
        if variables.written:
            variables.write(state[variables.after :])
    return result


def read(flat: Flat, cached_graph: CachedGraph | None, layout: ReplicaMesh) -> Call:
    """Check every leaf, and move it to where the program needs it.

    The leaves begin with the variables of NNX objects.

    Raises:
        ShapeError: Per-replica values do not fit. The error names all such arguments.
        ReplicaValueError: A value belongs to another strategy.
    """
    leak = cached_graph.find_leak() if cached_graph else None
    if leak is not None:
        raise leak
    leaves = cached_graph.read() if cached_graph else []
    num_state = len(leaves)
    names = functools.partial(LeafName, flat, cached_graph, num_state)
    if has_unfit(leaves):
        for i, leaf in enumerate(leaves):
            check_fits(names(i), leaf)
    values, uneven, moved = _check_values(flat, num_state, layout)
    leaves += values
    inputs = []
    has_padding = False
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Sharded):
            pieces = place_sharded(names(i), leaf, layout)
            moved = moved or pieces is not leaf
            has_padding = has_padding or pieces.has_padding
            leaf = pieces
        slot = make_in_slot(leaf, layout)
        inputs.append(slot)
        is_virtual = layout.num_virtual is not None
        if is_virtual and slot.kind is Kind.PER_REPLICA and not isinstance(leaf, PerReplica):
            check_virtual_rows(names(i), leaf, layout)
        # See Note [Who owns host memory]: the step may read the array after the call has returned.
        leaf = copy_if_writable(leaf.held if isinstance(leaf, Sharded) else array_of(leaf))
        # A described layout has no real devices to move arrays to.
        if must_move(leaf, slot) and layout.described is None:
            leaf, moved = put(leaf, slot.sharding), True
        leaves[i] = leaf
    graph = cached_graph.shape if cached_graph else None
    structure = exact_structure(flat.treedef)
    signature = Signature(
        flat.treedef,
        flat.slots,
        tuple(inputs),
        graph,
        uneven=tuple(uneven),
        structure=structure,
        settings=_compat.read_settings(),
    )
    return Call(flat, signature, leaves, cached_graph, moved, has_padding)


def _check_values(
    flat: Flat, num_state: int, layout: ReplicaMesh
) -> tuple[list[Any], list[tuple[int, Any]], bool]:
    """Return the dynamic leaves, the shapes of padded ones, and whether some leaf is new."""
    values: list[Any] = []
    uneven: list[tuple[int, Any]] = []
    # Collected, so that one error names all arguments that do not fit.
    misfits: list[ShapeError] = []
    moved = False
    for number, leaf in enumerate(flat.dynamic):
        if isinstance(leaf, PerReplica):
            if layout.is_shared:
                leaf = take_own(leaf, layout)
            name = LeafName(flat, None, 0, number)
            is_placed = leaf.is_global or _compat.is_inside_trace()
            shapes = None if is_placed else uneven_shapes(name, leaf, layout)
            if shapes is not None:
                uneven.append((num_state + number, shapes))
                leaf = padded(leaf, shapes)
            try:
                checked = place_per_replica(name, leaf, layout)
            except ShapeError as error:
                misfits.append(error)
                checked = leaf
            moved = moved or checked is not leaf or shapes is not None
            leaf = checked
        values.append(leaf)
    if misfits:
        raise _merge_errors(misfits)
    return values, uneven, moved


def _merge_errors(errors: list[ShapeError]) -> ShapeError:
    """Return one error for all arguments that do not fit, with the remedy of the first one."""
    if len(errors) == 1:
        return errors[0]
    found = [str(error).partition("\n\n") for error in errors]
    return ShapeError("\n".join(first for first, _, _ in found) + f"\n\n{found[0][2]}")


@dataclasses.dataclass
class LeafName:
    """The name of a leaf, computed only when a message needs it. NNX variables come first."""

    flat: Flat
    cached_graph: CachedGraph | None
    num_state: int
    number: int

    def __str__(self) -> str:
        if self.cached_graph is not None and self.number < self.num_state:
            return self.cached_graph.shape.name(self.number)
        return self.flat.name(self.number - self.num_state)


@called("strategy.run")
def run_inside_trace(call: Call, program: Program, around: AbstractMesh | None) -> Any:
    """Put the program of a call into the enclosing trace: nothing is compiled.

    Args:
        call: The call.
        program: Its program.
        around: The mesh of the caller's context, if axes are Explicit.

    Raises:
        ContextError: The step uses variables, but the enclosing function does not track them.
    """
    variables = program.variables
    if variables and current_binding() is None:
        names = [v.label for v in variables.all]
        raise ContextError(
            f"{name_call()} was called inside another function that JAX is tracing (jax.jit, scan, "
            f"grad), and its step uses {len(names)} variable(s): {names[:5]}.\n\n"
            "The traced function would keep the values that they have now, and assignments would "
            "be lost.\n\n"
            "Decorate that function with jaxdist.function instead of jax.jit, or call strategy.run "
            "outside and put what is around it into the step."
        )
    is_virtual = program.layout.num_virtual is not None
    inner = not_differentiable(program.call) if is_virtual else program.call
    if program.layout.num_logical > 1:
        # Under `grad` alone, JAX would evaluate the program operation by operation. It cannot do
        # that while some axes are manual and others automatic.
        inner = jax.jit(inner)
    results = call_in_types_of_trace(program, inner, call.leaves_of(program), around)
    return call.update_state(program, results)


@called("strategy.run")
def find_mesh_of_trace(layout: ReplicaMesh) -> AbstractMesh | None:
    """Return the mesh with Explicit axes that the types of the caller's values name; None for Auto.

    Raises:
        ContextError: JAX traces the caller under a mesh that has other devices, or Explicit axes
            of another mesh. A program over `layout` cannot be part of such a function.
    """
    if not _compat.is_inside_trace():
        return None
    mesh = _compat.get_context_mesh()
    if mesh is None or mesh.manual_axes:
        return None
    own = layout.mesh
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    same_devices = mesh.size == own.size and devices in (None, list(own.devices.flat))
    if same_devices and not mesh.explicit_axes:
        return None
    if same_devices and tuple(mesh.shape.items()) == tuple(own.shape.items()):
        abstract: AbstractMesh = mesh.abstract_mesh
        return abstract
    sizes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    types = ", ".join(f"{axis}: {size} {kind}" for (axis, size), kind in sizes)
    raise ContextError(
        f"{name_call()} was called in a function that JAX is tracing (jax.jit, grad, scan), under "
        f"a mesh of {mesh.size} device(s) with the axes ({types}). The strategy's mesh has "
        f"{own.size} device(s) and the axes {dict(own.shape)}.\n\n"
        "Values in that function have the types of its mesh, and one program has one mesh.\n\n"
        "Call the function under jax.set_mesh(strategy.mesh), or without a mesh; or call "
        "strategy.run outside of it. Outside of traced functions every mesh may be set."
    )


def call_in_types_of_trace(
    program: Program,
    inner: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    around: AbstractMesh | None,
) -> Sequence[Any]:
    """Call a program in a function that JAX traces; arguments and results have its types.

    Args:
        program: The program.
        inner: The function that calls it.
        leaves: Its inputs.
        around: The mesh of the caller's context, if axes are Explicit.
    """
    if program.traced.is_explicit:
        with _compat.use_abstract_mesh(around or program.layout.mesh.abstract_mesh):
            return inner(*leaves)
    leaves = [*map(view_auto, leaves)]
    found = (_compat.get_explicit_mesh(x) for x in leaves)
    mesh = around or next((m for m in found if m is not None), None)
    if mesh is None:
        return inner(*leaves)
    # `jax.grad` outside of `jit` and of `jax.set_mesh` makes its cotangents on one device, and
    # JAX refuses types with a mesh there.
    specs = None if around is None and not _compat.is_staged() else _find_specs(program)
    return _compat.call_with_auto_types(inner, leaves, specs, mesh)


def _find_specs(program: Program) -> list[PartitionSpec]:
    """Return the layout of each result; it is whole over logical devices where XLA chooses."""
    layout = program.layout
    return [
        o.spec(layout) if s is None or s.mesh != layout.mesh else s.spec
        for o, s in zip(program.outputs, program.result_shardings, strict=True)
    ]
