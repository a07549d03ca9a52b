"""Steps whose replicas have different shapes: one trace for each group, joined into one.

See Note [Joined traces].
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._called import call_as, called, name_call
from jaxdist._collectives import GatherLog, check_together, fresh_trace_key, record_gathers
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Static, is_static
from jaxdist._program.arguments.exact import exact
from jaxdist._program.proof.uneven_mean import MeanOverReplicas, find_averages, find_means
from jaxdist._program.state.no_rows import check_without_rows, has_empty_input, rows_of
from jaxdist._program.trace.trace import (
    Argument,
    Signature,
    TracedStep,
    input_differences,
    trace,
    trace_again,
)
from jaxdist._program.uneven.joined import Slot, run_joined
from jaxdist._program.uneven.joined_ops import Const, Groups, find_largest, is_equal, pad_to_shape
from jaxdist._replica import HasLayout
from jaxdist._values import Kind, PerReplica, find_shapes, mark_with_shapes
from jaxdist.errors import ShapeError, StateDivergenceError

# A gather whose size depends on the gathers before it needs one more round of tracing.
MAX_ROUNDS = 16

_TO_REDUCE = (
    "Reduce them over the dim that differs first (a sum and a count), or bring them together with "
    "get_replica_context().all_gather(value, axis) on that dim."
)
_TO_GATHER = "Gather on the dim that differs, or pad the others first."

Shapes = tuple[tuple[int, ...], ...]


def uneven_shapes(name: object, value: PerReplica, layout: ReplicaMesh) -> Shapes | None:
    """Return the shapes of all replicas if separate values differ in shape only, else None."""
    if value.is_global or len(value.values) != len(layout.local_replicas):
        return None
    arrays = value.values
    is_array = (isinstance(a, (jax.Array, np.ndarray)) for a in arrays)
    if not all(is_array) or any(isinstance(a, jax.core.Tracer) for a in arrays):
        return None
    # In a job of several processes the shapes of other processes are not known here.
    shapes = find_shapes(name, value, layout)
    if shapes is None or layout.num_logical > 1 or len({*shapes}) == 1:
        return None
    if len({(a.dtype, a.ndim) for a in arrays}) > 1:
        return None
    if layout.num_virtual is not None:
        raise not_virtually(shapes)
    return shapes


@called("strategy.run")
def not_virtually(shapes: Shapes) -> ShapeError:
    """Return the error for virtual replicas with values of different shapes."""
    count = len(shapes)
    rows = [s[0] if s else 0 for s in shapes]
    total = sum(rows)
    sizes = [n for n in (total - total % count, total + -total % count) if n]
    fitting = " or ".join(map(str, sizes))
    return ShapeError(
        f"{name_call()}: {count} virtual replicas of deterministic=True were given values of "
        f"different shapes: {', '.join(str(list(s)) for s in shapes)}.\n\n"
        "Replicas take turns on one program, so all of them have one shape; a batch has a "
        f"multiple of {count} rows, and this one has {total}.\n\n"
        f"Use {fitting} rows; or leave the last batch out (drop_remainder=True), or pad it with a "
        "mask (InputOptions(partial_batch=PartialBatch.PAD))."
    )


def padded(value: PerReplica, shapes: Shapes) -> PerReplica:
    """Return separate values, padded with zeros to the largest shape."""
    largest = find_largest(shapes)

    def pad(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return pad_to_shape(array, largest)
        # Padding on the host compiles nothing, however many shapes a dataset has.
        return np.pad(array, [(0, n - m) for n, m in zip(largest, array.shape, strict=True)])

    result = PerReplica(map(pad, value.values))
    mark_with_shapes(result, (largest,) * len(shapes))
    return result


def cut(array: jax.Array, shapes: Shapes, layout: ReplicaMesh) -> PerReplica:
    """Remove the padding of a per-replica result; return separate values in their own shapes."""
    rows = PerReplica.of_global(array).values
    own = [shapes[replica] for replica in layout.local_replicas]
    result = PerReplica(
        [v[tuple(slice(n) for n in shape)] for v, shape in zip(rows, own, strict=True)]
    )
    mark_with_shapes(result, shapes)
    return result


def traces_of_groups(
    fn: Callable[..., Any], signature: Signature, strategy: HasLayout
) -> tuple[list[Signature], list[TracedStep], Groups]:
    """Trace `fn` for each group of replicas with equal shapes.

    Raises:
        ShapeError: The numbers of rows in gathers keep changing from trace to trace.
    """
    layout: ReplicaMesh = strategy.layout
    columns = list(zip(*(shapes for _, shapes in signature.uneven), strict=True))
    kinds = list(dict.fromkeys(columns))
    groups = Groups(tuple(kinds.index(c) for c in columns), layout.replica_axes)
    firsts = map(columns.index, kinds)
    own = [get_signature_of_replica(signature, r, layout.num_replicas) for r in firsts]
    return own, _trace_with_known_gathers(fn, own, strategy, groups), groups


def joined_trace(
    signature: Signature,
    own: list[Signature],
    traces: list[TracedStep],
    groups: Groups,
    layout: ReplicaMesh,
) -> TracedStep:
    """Join the traces of all groups into one trace.

    Args:
        signature: The signature of the call.
        own: The signature of each group.
        traces: The trace of each group.
        groups: The group of each replica.
        layout: The layout of the strategy.

    Raises:
        ShapeError: The operands of a collective have different shapes.
        DivergentCollectiveError: The groups do not reach the same collectives.
        StateDivergenceError: Results differ in structure.
        NoRowsError: A mean over nothing would reach other replicas.
    """
    for group, (of_group, one) in enumerate(zip(own, traces, strict=True)):
        if has_empty_input(of_group, layout.num_replicas):
            check_without_rows(signature, of_group, one, groups.members(group), layout)
    template = join_templates(traces, groups)
    check_ranks(traces, groups)
    by_group = list(zip(*(t.shapes for t in traces), strict=True))
    uneven = {
        i: tuple(shapes[g] for g in groups.of_replica)
        for i, shapes in enumerate(by_group)
        if len(set(shapes)) > 1
    }
    of_replicas = [traces[g] for g in groups.of_replica]
    means = find_uneven_means(signature, of_replicas, layout)
    joined = dataclasses.replace(
        traces[0],
        template=template,
        shapes=tuple(map(find_largest, by_group)),
        uneven=uneven,
        means=(*traces[0].means, *means),
    )
    padded_inputs = dict(signature.uneven)

    def step(*leaves: Any) -> list[Any]:
        shapes = [
            tuple(
                s.inputs[i].local_shape(layout.num_replicas) if i in padded_inputs else leaf.shape
                for s in own
            )
            for i, leaf in enumerate(leaves)
        ]
        slots = [Slot(leaf, of_leaf) for leaf, of_leaf in zip(leaves, shapes, strict=True)]
        given = [
            [slots[o] if type(o) is Argument else Const(o) for o in t.operands] for t in traces
        ]
        return [s.value for s in run_joined([t.jaxpr for t in traces], given, groups)]

    return trace_again(joined, step, signature, layout)


def find_uneven_means(
    signature: Signature, traces: Sequence[TracedStep], layout: ReplicaMesh
) -> tuple[MeanOverReplicas, ...]:
    """Return the means over replicas that a step takes, if these have unequal numbers of rows.

    Args:
        signature: The signature of the step.
        traces: The trace or tape of each replica.
        layout: The strategy's layout.
    """
    rows = rows_of(signature, layout.num_replicas)
    if len(set(rows)) < 2:
        return ()
    # Without rows JAX leaves operations out.
    traced = traces[rows.index(max(rows))]
    axes = frozenset(layout.replica_axes)
    of_rows = [
        type(o) is Argument and signature.inputs[o].cut is None and bool(differs)
        for o, differs in zip(
            traced.operands, input_differences(signature, traced, axes), strict=True
        )
    ]
    return find_means(traced.jaxpr, of_rows, axes, layout.num_replicas)


def get_signature_of_replica(signature: Signature, replica: int, num_replicas: int) -> Signature:
    """Return the signature as if all replicas had the shapes of this replica."""
    inputs = list(signature.inputs)
    for number, shapes in signature.uneven:
        local = shapes[replica]
        shape = (local[0] * num_replicas, *local[1:])
        inputs[number] = dataclasses.replace(inputs[number], shape=shape)
    return dataclasses.replace(signature, inputs=tuple(inputs), uneven=())


@called("strategy.run")
def _trace_with_known_gathers(
    fn: Callable[..., Any], signatures: list[Signature], strategy: HasLayout, groups: Groups
) -> list[TracedStep]:
    """Trace each group until every gather knows the number of rows of each replica.

    A trace of one group does not show how many rows the other groups gather. The first round
    assumes nothing, and each further round uses the sizes that the round before has found.
    """
    assumed: tuple[tuple[int, ...], ...] = ()
    dims = _compat.InferredDims()
    for number in range(MAX_ROUNDS):
        dims.has_guessed = False
        logs = [GatherLog(assumed, len(groups.of_replica)) for _ in signatures]
        traces: list[TracedStep] = []
        failed: Exception | None = None
        for group, (signature, log) in enumerate(zip(signatures, logs, strict=True)):
            try:
                with record_gathers(log), _compat.infer_dims(dims) as reshapes:
                    restarts = log.clear, reshapes.restart
                    traces.append(trace(_call_at_start(restarts, fn), signature, strategy))
            except Exception as error:
                error.add_note(_describe_group(groups.members(group), signature))
                failed = failed or error
        # Not strict: after an error, a group has seen fewer gathers than the others.
        found = tuple(zip(*(logs[g].seen for g in groups.of_replica), strict=False))
        # A group without rows may have been traced before those that show what -1 stands for.
        is_guess = dims.has_guessed and number == 0
        # The step may fail only because the assumed sizes were wrong. So raise its error only if
        # the sizes were right.
        if failed is not None and found == assumed[: len(found)] and not is_guess:
            raise failed
        if failed is None and found == assumed and not is_guess:
            _check_asked(logs, groups)
            means = find_averages([log.averaged for log in logs])
            return [dataclasses.replace(t, means=means) for t in traces]
        assumed = found
    raise ShapeError(
        f"{name_call()}: the number of rows in an all_gather did not settle in {MAX_ROUNDS} rounds "
        "of tracing.\n\nThe number of rows that a replica passes to an all_gather must follow from "
        "the shapes of the arguments.\n\n"
        "Do not compute it from the number of rows that another all_gather returned."
    )


def _check_asked(logs: Sequence[GatherLog], groups: Groups) -> None:
    """Check the shapes of collectives, with errors that use the argument names of the caller."""
    if len({len(log.collectives) for log in logs}) > 1:
        return
    for calls in zip(*(log.collectives for log in logs), strict=True):
        first = calls[0]
        # If the groups made different calls, joining the traces raises.
        if len({(c.caller, c.free, tuple(c.values)) for c in calls}) == 1:
            named = {
                name: PerReplica([calls[g].values[name] for g in groups.of_replica])
                for name in first.values
            }
            remedy = _TO_GATHER if first.free else _TO_REDUCE
            call_as(first.caller, check_together, named, first.free, remedy=remedy)


def _describe_group(replicas: list[int], signature: Signature) -> str:
    has_none = any(0 in slot.shape for slot in signature.inputs)
    advice = (
        " They have no rows in this step. If a model cannot be traced so, pad the batch and "
        "mask the padding (InputOptions(partial_batch=PartialBatch.PAD)); balance_rows=True "
        "leaves no replica without rows, if a batch of the dataset has enough."
    )
    return f"Raised for replicas {replicas}.{advice if has_none else ''}"


def _call_at_start(
    restarts: Sequence[Callable[[], None]], fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a step that begins with some calls; JAX may trace a step several times."""

    @functools.wraps(fn, updated=())
    def restart_and_call(*args: Any, **kwargs: Any) -> Any:
        for restart in restarts:
            restart()
        return fn(*args, **kwargs)

    return restart_and_call


def choose_trace(
    signature: Signature, layout: ReplicaMesh
) -> Callable[[Callable[..., Any], Signature, HasLayout], TracedStep]:
    """Return the function that traces a step whose replicas have equal shapes."""
    return trace_without_rows if has_empty_input(signature, layout.num_replicas) else trace


def trace_without_rows(
    fn: Callable[..., Any], signature: Signature, strategy: HasLayout
) -> TracedStep:
    """Trace a step in which no replica has rows."""
    dims = _compat.InferredDims()

    def trace_so(asked: Signature) -> TracedStep:
        with fresh_trace_key(), _compat.infer_dims(dims) as reshapes:
            return trace(_call_at_start([reshapes.restart], fn), asked, strategy)

    try:
        traced = trace_so(signature)
        if not dims.has_guessed:
            return traced
    except Exception:
        if not dims.has_guessed:
            raise
    # A step with rows shows what -1 stands for in its reshapes.
    with contextlib.suppress(Exception):
        trace_so(_add_rows(signature, strategy.layout.num_replicas))
    return trace_so(signature)


def _add_rows(signature: Signature, num_replicas: int) -> Signature:
    """Return the signature with some rows on each replica instead of none."""
    return dataclasses.replace(
        signature,
        inputs=tuple(
            dataclasses.replace(slot, shape=(2 * num_replicas, *slot.shape[1:]))
            if slot.kind is Kind.PER_REPLICA and slot.shape[:1] == (0,)
            else slot
            for slot in signature.inputs
        ),
    )


def check_ranks(traces: Sequence[TracedStep], groups: Groups) -> None:
    """Check that each result has the same rank in all groups."""
    by_group = list(zip(*(t.shapes for t in traces), strict=True))
    for path, shapes in zip(traces[0].paths, by_group[traces[0].num_graph :], strict=True):
        if len({len(s) for s in shapes}) > 1:
            raise StateDivergenceError(_explain_ranks(path, shapes, groups))


@called("strategy.run")
def join_templates(traces: Sequence[TracedStep], groups: Groups) -> Any:
    """Return the structure of the results; Python values that differ become a `PerReplica`."""
    flat = [jax.tree.flatten(t.template, is_leaf=is_static) for t in traces]
    for group, (_, treedef) in enumerate(flat):
        # JAX considers the structures of {0.0: x} and {-0.0: x} equal.
        if exact(treedef) != exact(flat[0][1]):
            raise StateDivergenceError(
                f"{name_call()}: the step returns different structures on different replicas.\n"
                f"Replicas {groups.members(0)}: {flat[0][1]}\n"
                f"Replicas {groups.members(group)}: {treedef}\n\n"
                "The results of all replicas become one pytree, leaf by leaf.\n\n"
                "Return the same structure on every replica."
            )
    leaves = []
    for column in zip(*(found for found, _ in flat), strict=True):
        first = column[0]
        kinds = [isinstance(mark, Static) for mark in column]
        if len(set(kinds)) > 1:
            arrays = [r for r, g in enumerate(groups.of_replica) if not kinds[g]]
            raise StateDivergenceError(
                f"{name_call()}: a result is an array on replicas {arrays} and "
                f"{column[kinds.index(True)]!r} on others.\n\n"
                "A result is an array on all replicas, or a Python value on all of them.\n\n"
                "Return the same kind of value on every replica, such as jnp.asarray(value)."
            )
        alike = all(_is_same_mark(first, other) for other in column)
        differing = PerReplica([getattr(column[g], "value", None) for g in groups.of_replica])
        leaves.append(first if alike else Static(differing))
    return jax.tree.unflatten(flat[0][1], leaves)


def _is_same_mark(first: Any, other: Any) -> bool:
    if isinstance(first, Static) and isinstance(other, Static):
        return first == other or is_equal(first.value, other.value)
    return type(first) is type(other) and not isinstance(first, Static) and first == other


@called("strategy.run")
def _explain_ranks(path: str, shapes: Sequence[tuple[int, ...]], groups: Groups) -> str:
    found = groups.describe([str(list(shape)) for shape in shapes])
    return (
        f"{name_call()}: {path} has different ranks on different replicas.\n{found}\n\n"
        "Values of replicas may differ in size, not in rank.\n\n"
        "Keep all dims, also those of size 1 and 0."
    )
