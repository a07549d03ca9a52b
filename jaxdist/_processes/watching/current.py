"""The doctor of this process: `start_watching`, `stop_watching`, `get_doctor`."""

import atexit

from jaxdist._processes.agreement import find_ended_by
from jaxdist._processes.joining import at_leaving
from jaxdist._processes.process import Process
from jaxdist._processes.settings import Settings
from jaxdist._processes.store import Store
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.farewell import Farewell

_current: list[tuple[Doctor, Farewell]] = []


def get_doctor() -> Doctor | None:
    """Return the doctor of this process, or None if it is not watched."""
    return _current[0][0] if _current else None


def start_watching(process: Process, store: Store, settings: Settings) -> None:
    """Tell the other processes what this one is doing, until it leaves them.

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
    find_ended_by(lambda: _list_ended(doctor))
    at_leaving(stop_watching)
    # A process that joined by `jax.distributed.initialize` does not leave through jaxdist.
    atexit.register(stop_watching)


def stop_watching() -> None:
    """Stop what `start_watching` started; without it this does nothing."""
    if not _current:
        return
    find_ended_by(None)
    doctor, farewell = _current.pop()
    farewell.uninstall()
    doctor.stop()


def find_ended() -> dict[int, str]:
    """Return why processes have ended, by their numbers; empty if this process is not watched.

    Cost:
        Two requests to the store.
    """
    doctor = get_doctor()
    return {} if doctor is None else _list_ended(doctor)


def _list_ended(doctor: Doctor) -> dict[int, str]:
    """Return the processes that have ended, and how."""
    table = doctor.observer.look()
    return {i: seen.ended for i, seen in table.items() if seen.ended is not None}
