"""What a pipeline keeps on a stage while it runs: slots, and their bytes."""

from typing import Any, NamedTuple

import jax

from jaxdist._pipeline.inputs import StageFns, can_have_gradient, read_inputs
from jaxdist._pipeline.model import check_model
from jaxdist._pipeline.plain import get_factors
from jaxdist._pipeline.schedules import Table
from jaxdist._pipeline.slots import WAITING, find_slots
from jaxdist._pipeline.stage import Stage

_NAMES = {"x": "inputs", "g": "cotangents", "r": "residuals", "d": "deferred"}


class Kept(NamedTuple):
    """Slots of one kind on a stage.

    Attributes:
        slots: How many values wait at the same time, at most.
        nbytes: The bytes of all slots.
    """

    slots: int
    nbytes: int


def measure_slots(
    stage_fns: StageFns, parts: Any, batch: Any, table: Table, *, keys: Any = None
) -> dict[str, Kept]:
    """Return what a stage keeps, by kind: inputs, cotangents, residuals, and deferred for W.

    Nothing is computed, so all arguments may be shapes and dtypes. Each array counts whole where an
    axis beside that of the stages splits it.

    Args:
        stage_fns: The functions of the model.
        parts: As for `run_pipeline`.
        batch: As for `run_pipeline`.
        table: The schedule.
        keys: As for `run_pipeline`.
    """
    slots = find_slots(table)

    def start(parts: Any, batch: Any, keys: Any) -> Any:
        inputs = read_inputs(stage_fns, parts, batch, keys, table.chunks, table.stages)
        model = check_model(stage_fns, inputs, inputs.leaves)
        values = inputs.take_apart(inputs.leaves)
        dim = min(table.chunks - 1, 1)
        own = [
            jax.lax.slice_in_dim(a, 0, a.shape[dim] // table.stages, axis=dim)
            for a in values.layers
        ]
        wanted = inputs.take_apart([can_have_gradient(a.dtype) for a in inputs.leaves])
        _, of_layers = get_factors("mean", table.micro_batches)
        stage = Stage(model, slots, 0, of_layers, wanted, values._replace(layers=own))
        state = stage.start()
        return {kind: state.get(kind, []) for kind in WAITING}

    state = jax.eval_shape(start, parts, batch, keys)
    return {
        _NAMES[kind]: Kept(slots.sizes[kind], sum(a.size * a.dtype.itemsize for a in state[kind]))
        for kind in WAITING
    }
