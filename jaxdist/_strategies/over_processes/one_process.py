"""Checks for strategies of one process in a job of several processes."""

import logging
import os

from jaxdist import cluster_resolver
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import JaxdistError, SeveralProcessesError

_LOG = logging.getLogger("jaxdist")
_INSTEAD = "Make a MultiWorkerMirroredStrategy, which trains with all processes; "


def check_one_process(caller: str, layout: ReplicaMesh, *, were_chosen: bool) -> None:
    """Raise an error for a strategy of one process that may be meant for all processes.

    Args:
        caller: The name of the strategy class.
        layout: The mesh of the strategy.
        were_chosen: Whether the user named the devices.

    Raises:
        SeveralProcessesError: Devices of other processes, or default devices.
    """
    # A described slice runs nothing, so it may be planned in any process.
    me, count = layout.process.index, layout.process.count
    if layout.described is not None:
        return
    if count == 1:
        if not were_chosen:
            _warn_if_not_joined(caller)
        return
    others = sorted({*layout.device_owners.values()} - {me})
    if others:
        raise SeveralProcessesError(
            f"{caller} was given devices of process(es) {others}, and this is process {me} of "
            f"{count}.\n\n"
            f"{caller} works on the devices of one process: datasets, variables and values that "
            "each process makes for itself would differ between them.\n\n"
            f"{_INSTEAD}or, for a strategy of this process alone, its own devices: "
            f"{_format_own_devices(caller)}."
        )
    # With default devices, every process would train its own model without an error.
    if not were_chosen:
        raise SeveralProcessesError(
            f"{caller}() was made in process {me} of a job of {count} processes, and works on the "
            "devices of this process alone.\n\n"
            f"Each of the {count} processes would train its own model, without the batches of the "
            f"others.\n\n{_INSTEAD}or, where each process is meant to work on its own, "
            f"its devices by name: {_format_own_devices(caller)}."
        )
    warn_if_alone(caller, layout)


def warn_if_alone(caller: str, layout: ReplicaMesh) -> None:
    """Log a warning if the job has other processes: the strategy does not communicate with them."""
    process = layout.process
    if process.count > 1:
        _LOG.warning(
            "%s in process %d of a job of %d processes works on the devices of this process "
            "alone: nothing is exchanged with the others, and each process trains a model of its "
            "own.",
            caller,
            process.index,
            process.count,
        )


def _warn_if_not_joined(caller: str) -> None:
    """Log a warning in a task of a cluster whose processes have not been joined."""
    try:
        # A copy: the resolver of Slurm sets the GPUs of its task.
        environ = dict(os.environ)
        source = cluster_resolver.find_source(environ)
        resolver = cluster_resolver.choose_resolver(environ)
        tasks = cluster_resolver.list_training_tasks(resolver)
        own = cluster_resolver.find_own_task(caller, resolver)
    except JaxdistError:
        # This strategy does not use the cluster, so its errors do not matter here.
        return
    if own in tasks and len(tasks) > 1 and "ps" not in resolver.cluster_spec().jobs:
        _LOG.warning(
            "%s() in the task %s %d of a cluster of %d processes (%s) works on the devices of "
            "this process alone: each process trains a model of its own. "
            "MultiWorkerMirroredStrategy() trains with all of them; devices by name, %s, keep "
            "this message out.",
            caller,
            *own,
            len(tasks),
            source.because,
            _format_own_devices(caller),
        )


def _format_own_devices(caller: str) -> str:
    one = caller == "OneDeviceStrategy"
    return f"{caller}(jax.local_devices(){'[0]' if one else ''})"
