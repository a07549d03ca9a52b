"""Makes a `Program` of a traced function: proves, checks state, and describes the results."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist._collectives import TraceNotes, is_below_a_byte
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.compiler_options import CompilerOptions
from jaxdist._program.arguments.in_slot import OutSlot
from jaxdist._program.compile.program import Program
from jaxdist._program.logical.logical_device import marks_of_results
from jaxdist._program.logical.placed_work import placed_work
from jaxdist._program.logical.spmd_inputs import check_inputs
from jaxdist._program.nnx.graph_rules import Combination
from jaxdist._program.proof.replication import TracedCollective, analyse
from jaxdist._program.state.constant_additions import (
    check_constant_additions,
    trace_increments,
    warn_of_divided_metrics,
)
from jaxdist._program.state.no_rows import (
    check_without_rows,
    find_places_with_rows,
    has_empty_input,
)
from jaxdist._program.state.state import check_functional_state, find_combinations
from jaxdist._program.trace.trace import (
    Argument,
    Signature,
    TracedStep,
    input_differences,
    replica_axes_of,
)
from jaxdist._program.variables.lift import LiftedVariables, check_equal
from jaxdist._values import Kind
from jaxdist.errors import ArgumentTypeError


def build(
    name: str,
    traced: TracedStep,
    signature: Signature,
    variables: LiftedVariables,
    layout: ReplicaMesh,
    input_names: Sequence[str],
    donated_args: Sequence[int],
    donated: Sequence[int],
    where: str,
    notes: TraceNotes,
    compiler_options: CompilerOptions,
) -> Program:
    """Analyse the trace of a step, and raise if state would differ between replicas."""
    graph_size = len(signature.graph.paths) if signature.graph else 0
    graph_names = [signature.graph.name(i) for i in range(graph_size)] if signature.graph else []
    written_names, read_names = variables.names
    state_names = [*graph_names, *written_names]
    names = [*state_names, *traced.paths]
    names_in = (*state_names, *input_names, *read_names)
    for input_name, slot in zip(names_in, signature.inputs, strict=True):
        if slot.kind is not Kind.MIRRORED:
            check_whole_bytes(input_name, slot.dtype, "went into strategy.run")
    if layout.spmd and layout.num_logical > 1:
        check_inputs(signature, traced, names_in, layout, len(variables.read_only))
    axes = replica_axes_of(layout)
    # Replicas with different numbers of rows were already checked, each group with its own trace.
    if axes and not signature.uneven and has_empty_input(signature, layout.num_replicas):
        check_without_rows(signature, signature, traced, range(layout.num_replicas), layout)
    found = analyse(traced.jaxpr, input_differences(signature, traced, axes), axes)
    # A `Sharded` result differs between replicas on purpose: each has its piece.
    differs = [bool(d) and i not in traced.cuts for i, d in enumerate(found.outputs)]
    combined: tuple[Combination, ...] = ()
    if axes:
        places = find_places_with_rows(signature, layout)
        combined = find_combinations(signature, traced, differs, layout.num_replicas, places)
        warn_of_divided_metrics(signature, traced, axes, layout.num_replicas, where)
    extra = [
        _collective_for_variable(signature, traced, i, layout) for c in combined for i in c.numbers
    ]
    # After the analysis, which finds the metrics that differ.
    traced = trace_increments(traced, signature, combined, layout)
    if axes:
        check_functional_state(signature, traced, differs, donated_args, layout.num_replicas, where)
        of_variables = differs[graph_size : traced.num_graph]
        check_equal(variables.written, of_variables, layout.num_replicas)
        written = variables.written
        of_metrics = {graph_size + i for i, v in enumerate(written) if v._is_of_metric}
        old = {n for n, o in enumerate(traced.operands) if type(o) is Argument and o in of_metrics}
        check_constant_additions(written, traced, old, graph_size, axes, layout.num_replicas)
    outputs: list[OutSlot] = []
    own_copies = {graph_size + i for i, v in enumerate(variables.written) if v.home.per_replica}
    marks = marks_of_results(traced.jaxpr) if layout.num_logical > 1 else [None] * len(names)
    results = zip(names, traced.jaxpr.outvars, traced.shapes, strict=True)
    for i, (result_name, var, shape) in enumerate(results):
        # State that differs was refused or combined above, except for variables with own copies.
        different = (differs[i] and i >= traced.num_graph) or i in own_copies
        cut = traced.cuts.get(i)
        kind = Kind.SHARDED if cut else Kind.PER_REPLICA if different else Kind.MIRRORED
        # A variable stays on the devices where it is stored, whatever the step marks.
        parts = None if graph_size <= i < traced.num_graph else marks[i]
        if kind is not Kind.MIRRORED:
            check_whole_bytes(result_name, var.aval.dtype, "comes out of strategy.run")
        outputs.append(OutSlot(result_name, kind, shape, var.aval.dtype, cut, parts))
    return Program(
        name,
        layout,
        signature,
        traced,
        tuple(outputs),
        (*found.collectives, *extra),
        names_in,
        combined,
        tuple(d if d < graph_size else d + len(variables.written) for d in donated),
        variables,
        notes,
        placed=tuple(placed_work(traced.jaxpr)) if layout.num_logical > 1 else (),
        asked_options=compiler_options,
    )


def check_whole_bytes(name: str, dtype: Any, what: str) -> None:
    """Raise if the replicas have different arrays of a dtype below one byte.

    Raises:
        ArgumentTypeError: The dtype is `int4` or similar. JAX cannot pass such arrays split.
    """
    if isinstance(dtype, np.dtype) and is_below_a_byte(dtype):
        wider = "float16" if jnp.issubdtype(dtype, np.floating) else "int8"
        raise ArgumentTypeError(
            f"{name} {what} with a value for each replica, and its dtype is {dtype}.\n\n"
            "JAX can hold numbers of less than a byte in arrays that are the same on all replicas, "
            "but not in arrays that are split.\n\n"
            f"Cast it before, and back inside the step: value.astype({wider!r})."
        )


def _collective_for_variable(
    signature: Signature, traced: TracedStep, number: int, layout: ReplicaMesh
) -> TracedCollective:
    aval = traced.jaxpr.outvars[number].aval
    # Narrow floats are combined in f32, so at least 4 bytes are sent.
    size = int(aval.size) * max(aval.dtype.itemsize, 4)
    name = signature.graph.name(number) if signature.graph else ""
    return TracedCollective("psum", layout.replica_axes, size, 1, False, f"jaxdist, for {name}", 1)
