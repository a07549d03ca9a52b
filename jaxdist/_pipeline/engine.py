"""The engine: runs a table of ticks as one program on all stages.

Note:
    All devices run the same program in a `jax.shard_map` over the axis of the stages. A loop runs
    consecutive ticks of equal kinds. In each tick, a device enters its operation by a conditional,
    whose predicate is read from the table at the device's place on the axis. So a stage without an
    operation really does nothing, and all devices of one stage take the same branch: axes beside
    that of the stages stay automatic in there. Collectives over the axis of the stages are outside
    of the conditionals, where all stages meet: after a tick, outputs move to the next stage, or
    cotangents to the one before. See also Note [Permutes inside of an operation].

    What a stage keeps between ticks is in slots, which begin as zeros and are written before they
    are read. What an idle stage sends is put into a slot that is never read.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist._called import refuse
from jaxdist._pipeline.costs import Kept, count_kept
from jaxdist._pipeline.derivative import attach_gradients
from jaxdist._pipeline.inputs import Inputs, Parts, StageFns, pick, read_inputs
from jaxdist._pipeline.model import Model, check_model
from jaxdist._pipeline.plain import get_factors
from jaxdist._pipeline.schedules import KINDS, SCHEDULES, Table, Tick, kinds_of
from jaxdist._pipeline.slots import find_slots
from jaxdist._pipeline.stage import Row, Stage, State, send_to_all
from jaxdist._validate import refuse_choice
from jaxdist.errors import ShapeError

Told: TypeAlias = Callable[[Table, dict[str, Kept]], None]


def run_pipeline(
    stage_fns: StageFns,
    parts: Any,
    batch: Any,
    *,
    axis: str,
    stages: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    keys: Any = None,
    reduce: str = "mean",
    head_specs: Any = None,
    permutes_meet: bool = False,
    has_aux: bool = False,
    told: Told | None = None,
) -> Any:
    """Return the loss of all micro-batches, computed by stages; its gradients come with it.

    It is called where `axis` is automatic: in a `jax.jit`, or in a `jax.shard_map` over others.
    Gradients are computed before the cotangent of the loss is known. So a factor that keeps
    gradients in float16 from becoming zero belongs into the head.

    Args:
        stage_fns: The functions of the model.
        parts: The parameters of embed, of the layers, and of head. Stacks of layers are
            `[layers, ...]`, or `[chunks, layers / chunks, ...]`.
        batch: Arrays `[micro_batches, rows, ...]`.
        axis: The mesh axis of the stages.
        stages: Its size.
        schedule: A name of `SCHEDULES`.
        chunks: Number of pieces of the model on each stage.
        keys: Random keys `[micro_batches, rows]`, or None.
        reduce: "mean" or "sum" of the losses of the micro-batches. Losses of layers are a mean
            over micro-batches in both cases.
        head_specs: None, or a `PartitionSpec` for each parameter of the head. If one has `axis`,
            all stages run the head together, each with its part: see `vocabulary_loss`.
        permutes_meet: Whether a `ppermute` waits for all devices of the backend, also for those
            that it does not name. See Note [Permutes inside of an operation].
        has_aux: Whether the head, which is not split, returns `(loss, aux)`. Then the result is
            `(loss, aux)` with arrays `[micro_batches, rows, ...]`, which have no gradients.
        told: It is called with the table that is traced, and with what a stage keeps.
    """
    inputs = read_inputs(stage_fns, parts, batch, keys, chunks, stages)
    if schedule not in SCHEDULES:
        raise refuse_choice("schedule", schedule, SCHEDULES)
    table = SCHEDULES[schedule](stages, inputs.micro_batches, chunks)
    counts, whole = inputs.counts, PartitionSpec()
    of_layers = PartitionSpec(axis) if chunks == 1 else PartitionSpec(None, axis)
    of_head = _read_head_specs(inputs, head_specs, axis, stages)
    specs = [
        *[whole] * counts.embed,
        *[of_layers] * counts.layers,
        *of_head,
        *[whole] * (counts.shared + counts.rows + counts.keys),
    ]

    def run(table: Table, wanted: Sequence[bool], leaves: list[Any]) -> tuple[Any, list[Any]]:
        out = [spec for spec, w in zip(specs, wanted, strict=True) if w]

        def on_one_device(leaves: list[Any]) -> tuple[Any, list[Any]]:
            is_split = [spec != whole for spec in of_head]
            model = check_model(
                stage_fns,
                inputs,
                leaves,
                axis=axis,
                has_split_head=any(is_split),
                has_aux=has_aux,
            )
            skips = not (permutes_meet and _may_permute(model))
            ticks = _Ticks(model, table, axis, is_split, skips, told)
            return ticks.run(reduce, inputs.take_apart(wanted), inputs.take_apart(leaves))

        result, found = jax.shard_map(
            on_one_device,
            in_specs=(specs,),
            out_specs=(whole, out),
            axis_names={axis},
            check_vma=False,
        )(leaves)
        each = iter(found)
        return result, [next(each) if w else None for w in wanted]

    def value(leaves: list[Any]) -> Any:
        return run(table.forward_only, [False] * len(leaves), leaves)[0]

    def gradients(wanted: Sequence[bool], leaves: list[Any]) -> tuple[Any, list[Any]]:
        return run(table, wanted, leaves)

    return attach_gradients(value, gradients, inputs.leaves)


# Note [Permutes inside of an operation]
# Devices of one stage exchange values inside of its operation: by collectives of the user's
# functions, or as XLA divides them over the other axes of the mesh. Stages do that at different
# ticks. An all-reduce, an all-gather or an all-to-all waits for the devices of its group only. But
# on CPU and GPU, a permute may wait for all devices, and take the values of another tick of theirs
# for its own. So there all stages run the operations of a tick, and drop what is not theirs. The
# time is the same, since all wait for the slowest one, but for ticks of two kinds.
def _may_permute(model: Model) -> bool:
    """Whether an operation may have a permute: of a function, or of XLA for an automatic axis."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (*mesh.auto_axes, *mesh.explicit_axes)
    return model.has_permutes or any(mesh.shape[axis] > 1 for axis in others)


def _read_head_specs(inputs: Inputs, specs: Any, axis: str, stages: int) -> list[PartitionSpec]:
    """Return a spec for each leaf of the head, over the axis of the stages only."""
    leaves = inputs.take_apart(inputs.leaves).head
    if specs is None:
        return [PartitionSpec()] * len(leaves)
    found = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    own = []
    for leaf, spec in zip(leaves, found, strict=True):
        dims = [n for n, entry in enumerate(spec) if entry == axis]
        if dims and leaf.shape[dims[0]] % stages:
            raise refuse(
                f"a head {[*leaf.shape]}, whose dim {dims[0]} is split over {stages} stages.",
                "Each stage has an equal part of the head.",
                f"Pad this dim to {-(-leaf.shape[dims[0]] // stages) * stages}.",
                kind=ShapeError,
            )
        own.append(PartitionSpec(*[None] * dims[0], axis) if dims else PartitionSpec())
    return own


class _Ticks:
    """Runs all ticks on one device.

    Args:
        model: The functions of the model.
        table: The schedule.
        axis: The axis of the stages.
        is_split: Which parameters of the head are split over the stages.
        skips: Whether a stage skips the operations of others, or runs and drops them.
        told: It is called with the table and with what a stage keeps.
    """

    def __init__(
        self,
        model: Model,
        table: Table,
        axis: str,
        is_split: list[bool],
        skips: bool,
        told: Told | None,
    ) -> None:
        self._model = model
        self._table = table
        self._axis = axis
        self._is_split = is_split
        self._skips = skips
        self._told = told
        self._slots = find_slots(table)

    def run(self, reduce: str, wanted: Parts, values: Parts) -> tuple[Any, list[Any]]:
        """Return the loss with what the head returns beside it, and the wanted gradients."""
        me = jax.lax.axis_index(self._axis)
        scale, of_layers = get_factors(reduce, self._table.micro_batches)
        stage = Stage(self._model, self._slots, me, of_layers, wanted, values)
        state = stage.start()
        if self._told is not None:
            self._told(self._table, count_kept(self._slots, state))
        for _, groups in itertools.groupby(self._table.groups, self._find_pattern):
            ticks = list(zip(*groups, strict=True))

            def run_group(state: State, rows: list[Row], ticks: Any = ticks) -> Any:
                for of_tick, row in zip(ticks, rows, strict=True):
                    state = self._run_tick(stage, of_tick, state, row)
                return state, None

            rows = [self._read_own(of_tick, me) for of_tick in ticks]
            state, _ = jax.lax.scan(run_group, state, rows)
        sums = stage.results(state)
        # A layer is on one stage. The other sums are zeros where a stage has not added to them.
        parts = state["loss"], sums.embed, sums.head, sums.shared, sums.rows
        loss, embed, head, shared, rows = jax.lax.psum(parts, self._axis)
        own = pick(self._is_split, wanted.head)
        head = [part if o else h for part, h, o in zip(sums.head, head, own, strict=True)]
        found = [g * scale for g in (*embed, *sums.layers, *head, *shared, *rows)]
        is_last = me == self._table.stages - 1
        aux = [send_to_all(a, is_last, self._axis) for a in state["aux"]]
        return self._model.join(loss * scale, aux), found

    def _find_pattern(self, group: Sequence[Tick]) -> tuple[tuple[str, bool], ...]:
        """Return the kinds of each tick of a group, and whether a split head follows it."""
        # With chunks, the last one has some of the ticks, in turns. Each turn would be a loop.
        has_head = self._model.head_axis is not None and self._table.chunks == 1
        return tuple(
            (kinds_of(tick), has_head and self._table.count_ends([tick], "F").last == 1)
            for tick in group
        )

    def _read_own(self, ticks: Sequence[Tick], me: Any) -> Row:
        """Return the columns of this device of the table, as integers."""
        arrays = self._slots.arrays(ticks)
        return {name: jnp.asarray(array)[:, me] for name, array in arrays.items()}

    def _run_tick(self, stage: Stage, ticks: Sequence[Tick], state: State, row: Row) -> State:
        """Run one of `ticks`: the operation of this device, then what moves to its neighbours."""
        kinds, ends = kinds_of(ticks[0]), functools.partial(self._table.count_ends, ticks)
        is_own = [row["kind"] == 1 + KINDS.index(kind) for kind in kinds]
        operations = [stage.operation(kind, ends(kind)) for kind in kinds]
        if self._skips:
            # The branch of the kind of this device; 0, which does nothing, for none.
            number = sum((n + 1) * own.astype(jnp.int32) for n, own in enumerate(is_own))
            state = jax.lax.switch(number, [lambda state, row: state, *operations], state, row)
        else:
            for operation, own in zip(operations, is_own, strict=True):
                state = operation(state, {**row, "on": own})
        stages = self._table.stages
        up = [(i, (i + 1) % stages) for i in range(stages)]
        if "F" in kinds:
            arrived = jax.lax.ppermute(state["up"], self._axis, up)
            state = stage.take_input(state, row, arrived)
        if "B" in kinds or "I" in kinds:
            down = [(there, here) for here, there in up]
            arrived = jax.lax.ppermute(state["down"], self._axis, down)
            state = stage.take_cotangent(state, row, arrived)

        def run_head(state: State) -> State:
            return stage.run_split_head(state, row, self._axis, stages)

        if self._model.head_axis is None:
            return state
        part = ends("F").last
        if part == 1:
            return run_head(state)
        # All stages take the same branch, so they meet in its collectives.
        return _compat.cond_in_part(part, row["has_last"] > 0, run_head, lambda state: state, state)
