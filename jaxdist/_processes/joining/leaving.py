"""Leaves the other processes of the job.

Note [Leaving]
~~~~~~~~~~~~~~
With recoverable processes, JAX's own barrier at the end does not wait. If the process that hosts
the coordination service ends first, JAX ends all slower ones with SIGABRT although their work is
done. So each process writes `jaxdist/left/<index>`, and the host of the service stays until every
living process has closed its connection. The service itself reports too early: it counts a process
as gone once it has read the request to leave, but a process that still waits for the reply ends
with SIGABRT when the service ends. Threads that use the store are stopped first: a thread inside a
request when the interpreter ends would end the process with SIGABRT.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable

import jax

from jaxdist._compat import (
    get_coordination_client,
    get_service_port,
    hosts_coordination_service,
)
from jaxdist._processes.connections import can_list_connections, count_clients
from jaxdist._processes.joining.launched import SERVICE
from jaxdist._processes.process import get_process_of_job
from jaxdist._processes.settings import get_settings
from jaxdist._processes.store import Store, get_store
from jaxdist.errors import UnavailableError

_LOG = logging.getLogger("jaxdist")
LEFT = "jaxdist/left"
_SECONDS_BETWEEN_LOOKS = 0.01
_SECONDS_UNTIL_LOG = 5.0
# A connection that is silent for this many heartbeats belongs to a process that is stopped, or to
# a machine that failed.
_HEARTBEATS = 1.5
# Used where connections cannot be listed.
_SECONDS_OF_GRACE = 1.0

_callbacks: list[Callable[[], None]] = []
_is_registered: list[bool] = []


def at_leaving(callback: Callable[[], None]) -> None:
    """Call a function before this process leaves the others; the newest is called first."""
    _callbacks.append(callback)


def leave_at_exit() -> None:
    """Leave the others when the interpreter ends."""
    if not _is_registered:
        _is_registered.append(True)
        atexit.register(leave)


def leave(reason: str = "its program has ended") -> None:
    """Leave the other processes of the job; a second call does nothing.

    Cost:
        The process that hosts the coordination service waits until all others have left or ended.

    Args:
        reason: What the others report if they still wait for this process.
    """
    while _callbacks:
        _callbacks.pop()()
    store, job = get_store(), get_process_of_job()
    if store is None or job is None:
        return
    try:
        # A process that ends with an exception has written its note before.
        if store.get(f"{LEFT}/{job.index}") is None:
            store.set(f"{LEFT}/{job.index}", reason, overwrite=True)
        # Under a launcher the service of process 0 has no members: JAX always starts one.
        if hosts_coordination_service() and not os.environ.get(SERVICE):
            _wait_for_others(job.index, job.count, store)
        jax.distributed.shutdown()
    except (UnavailableError, jax.errors.JaxRuntimeError) as error:
        # The service has ended, so the others cannot be reached.
        _LOG.info("The others were not told that this process ends: %s", str(error).splitlines()[0])


def _wait_for_others(index: int, count: int, store: Store) -> None:
    """Wait until no other process is connected to the service that this process hosts."""
    settings, port = get_settings(), get_service_port()
    if port is None or not can_list_connections():
        # Returns when all others have left or have sent the service nothing for long.
        get_coordination_client().get_live_nodes(list(range(count)))
        time.sleep(_SECONDS_OF_GRACE)
        return
    start, has_logged = time.monotonic(), False
    # A process that hangs stays connected. Its doctor reports it.
    while count_clients(port, _HEARTBEATS * settings.heartbeat_seconds):
        waited = time.monotonic() - start
        if waited > settings.collective_seconds:
            return
        if waited > _SECONDS_UNTIL_LOG and not has_logged:
            has_logged = True
            gone = {int(key.rpartition("/")[2]) for key in store.list(LEFT)}
            others = sorted({*range(count)} - gone - {index})
            _LOG.warning(
                "Process %d hosts the coordination service of the job, so it waits for %s.",
                index,
                ", ".join(f"process {i}" for i in others) or "others, which are leaving",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
