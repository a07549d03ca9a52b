"""Saves a checkpoint at the same step in every process before a job is ended."""

from jaxdist._preemption.config import TerminationConfig as TerminationConfig
from jaxdist._preemption.handler import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from jaxdist._preemption.watcher import PreemptionWatcher as PreemptionWatcher
