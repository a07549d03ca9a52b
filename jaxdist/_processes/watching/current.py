"""The doctor of this process: `start_watching`, `stop_watching`, `get_doctor`."""

import atexit
from collections.abc import Sequence
from typing import Any

from jaxdist._processes import joining
from jaxdist._processes.agreement import find_ended_by
from jaxdist._processes.joining import at_leaving
from jaxdist._processes.process import Process, get_process_of_job
from jaxdist._processes.settings import Settings, get_settings
from jaxdist._processes.store import Store, get_store
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.explain import Farewell
from jaxdist._processes.watching.lifelines import Lifelines

_current: list[tuple[Doctor, Farewell]] = []
_lifelines: list[Lifelines] = []


def get_doctor() -> Doctor | None:
    """Return the doctor of this process, or None if the process is not watched."""
    return _current[0][0] if _current else None


def start_watching(process: Process, store: Store, settings: Settings) -> None:
    """Report to the other processes what this one is doing, until it leaves them.

    A second call does nothing.

    Args:
        process: This process.
        store: The store of the job.
        settings: How long processes wait for each other.
    """
    if _current or process.count == 1:
        return
    doctor = Doctor(process, store, settings)
    farewell = Farewell(doctor, store)
    _current.append((doctor, farewell))
    farewell.install()
    doctor.start()
    address = joining.get_own_address()
    # Processes that JAX found by itself, as on TPUs, have no address here.
    if address is not None:
        lifelines = Lifelines(process, store, address)
        _lifelines.append(lifelines)
        lifelines.start()
    find_ended_by(lambda: _list_ended(doctor))
    at_leaving(stop_watching)
    # A process that joined by `jax.distributed.initialize` does not leave through jaxdist.
    atexit.register(stop_watching)


def stop_watching() -> None:
    """Stop what `start_watching` started, if anything."""
    if not _current:
        return
    find_ended_by(None)
    while _lifelines:
        _lifelines.pop().stop()
    doctor, farewell = _current.pop()
    farewell.uninstall()
    doctor.stop()


def find_ended() -> dict[int, str]:
    """Return why processes have ended, by process number; empty if this process is not watched.

    Cost:
        Two requests to the store.
    """
    doctor = get_doctor()
    return {} if doctor is None else _list_ended(doctor)


def _list_ended(doctor: Doctor) -> dict[int, str]:
    """Return the processes that have ended, and how."""
    table = doctor.observer.look()
    return {i: seen.ended for i, seen in table.items() if seen.ended is not None}


def join(addresses: Sequence[str], index: int) -> Process:
    """Join the other processes of a cluster, and watch them; see `joining.join`.

    Raises:
        The errors of `joining.join`.
    """
    process = joining.join(addresses, index)
    watch()
    return process


def connect(**how: Any) -> None:
    """Join the other hosts of a TPU slice, and watch them; see `joining.connect`.

    Raises:
        The errors of `joining.connect`.
    """
    joining.connect(**how)
    watch()


def watch() -> None:
    """Watch the other processes, if this one has joined any; a second call does nothing."""
    store, process = get_store(), get_process_of_job()
    if store is not None and process is not None:
        start_watching(process, store, get_settings())
