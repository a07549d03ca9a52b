"""Stages of layers as one program: schedules, the engine, and the same loss on one device."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._pipeline.costs import Kept as Kept
    from jaxdist._pipeline.engine import run_pipeline as run_pipeline
    from jaxdist._pipeline.inputs import StageFns as StageFns
    from jaxdist._pipeline.plain import run_plain as run_plain
    from jaxdist._pipeline.schedules import SCHEDULES as SCHEDULES
    from jaxdist._pipeline.schedules import Op as Op
    from jaxdist._pipeline.schedules import Table as Table
    from jaxdist._pipeline.schedules import gpipe as gpipe
    from jaxdist._pipeline.schedules import one_f_one_b as one_f_one_b
    from jaxdist._pipeline.schedules import zero_bubble as zero_bubble
    from jaxdist._pipeline.slots import Slots as Slots
    from jaxdist._pipeline.slots import find_slots as find_slots
    from jaxdist._pipeline.stacks import find_chunks as find_chunks
    from jaxdist._pipeline.stacks import note_chunks as note_chunks
    from jaxdist._pipeline.vocabulary import vocabulary_loss as vocabulary_loss

_open_late(__name__)
