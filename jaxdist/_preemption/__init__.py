"""Saves a checkpoint at the same step in every process before a job is ended."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._preemption.config import TerminationConfig as TerminationConfig
    from jaxdist._preemption.handler import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    )
    from jaxdist._preemption.notices import PreemptionWatcher as PreemptionWatcher

_open_late(__name__)
