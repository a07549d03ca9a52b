"""A job that is told to end saves a checkpoint first, at the same step in every process."""

from jaxdist._preemption.config import TerminationConfig as TerminationConfig
from jaxdist._preemption.handler import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from jaxdist._preemption.watcher import PreemptionWatcher as PreemptionWatcher
