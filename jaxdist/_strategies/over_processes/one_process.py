"""Checks for strategies of one process in a job of several processes."""

import logging
import os

from jaxdist import cluster_resolver
from jaxdist._called import name_call, refuse
from jaxdist._cluster import find_task
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import JaxdistError, SeveralProcessesError

_LOG = logging.getLogger("jaxdist")
_INSTEAD = "Make a MultiWorkerMirroredStrategy, which trains with all processes; "


def check_one_process(layout: ReplicaMesh, *, were_chosen: bool) -> None:
    """Raise an error for a strategy of one process that may be meant for all processes.

    Args:
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
            _warn_if_not_joined()
        return
    others = sorted({*layout.device_owners.values()} - {me})
    if others:
        raise refuse(
            f"devices of process(es) {others}, and this is process {me} of {count}.",
            f"{name_call()} works on the devices of one process: datasets, variables and values "
            "that each process makes for itself would differ between them.",
            f"{_INSTEAD}or, for a strategy of this process alone, its own devices: "
            f"{_format_own_devices()}.",
            kind=SeveralProcessesError,
        )
    # With default devices, every process would train its own model without an error.
    if not were_chosen:
        raise SeveralProcessesError(
            f"{name_call()}() was made in process {me} of a job of {count} processes, and works "
            f"on the devices of this process alone.\n\nEach of the {count} processes would train "
            f"its own model, without the batches of the others.\n\n{_INSTEAD}or, where each "
            f"process is meant to work on its own, its devices by name: {_format_own_devices()}."
        )
    warn_if_alone(layout)


def warn_if_alone(layout: ReplicaMesh) -> None:
    """Log a warning if the job has other processes: the strategy does not communicate with them."""
    caller = name_call()
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


def _warn_if_not_joined() -> None:
    """Log a warning in a task of a cluster whose processes have not been joined."""
    caller = name_call()
    try:
        # A copy: the resolver of Slurm sets the GPUs of its task.
        environ = dict(os.environ)
        source = cluster_resolver.find_source(environ)
        task = find_task(cluster_resolver.choose_resolver(environ))
    except JaxdistError:
        # This strategy does not use the cluster, so its errors do not matter here.
        return
    if not task.is_alone and "ps" not in task.counts:
        _LOG.warning(
            "%s() in the task %s %d of a cluster of %d processes (%s) works on the devices of "
            "this process alone: each process trains a model of its own. "
            "MultiWorkerMirroredStrategy() trains with all of them; devices by name, %s, keep "
            "this message out.",
            caller,
            task.job,
            task.index,
            len(task.training),
            source.because,
            _format_own_devices(),
        )


def _format_own_devices() -> str:
    caller = name_call()
    one = caller == "OneDeviceStrategy"
    return f"{caller}(jax.local_devices(){'[0]' if one else ''})"
