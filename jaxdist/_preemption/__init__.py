"""A job that is told to end saves a checkpoint first, at the same step in every process."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._preemption.config import TerminationConfig as TerminationConfig
    from jaxdist._preemption.handler import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    )
    from jaxdist._preemption.watcher import PreemptionWatcher as PreemptionWatcher

_open_late(__name__)
