"""`join` and `connect`: this process joins the others, and they see what it does from then on."""

from collections.abc import Sequence
from typing import Any

from jaxdist._processes import joining
from jaxdist._processes.process import Process, get_process_of_job
from jaxdist._processes.settings import get_settings
from jaxdist._processes.store import get_store
from jaxdist._processes.watching import start_watching


def join(caller: str, addresses: Sequence[str], index: int) -> Process:
    """Join the other processes of a cluster, and watch them; see `joining.join`.

    Raises:
        Everything that `joining.join` raises.
    """
    process = joining.join(caller, addresses, index)
    watch()
    return process


def connect(**how: Any) -> None:
    """Join the other hosts of a TPU slice, and watch them; see `joining.connect`.

    Raises:
        Everything that `joining.connect` raises.
    """
    joining.connect(**how)
    watch()


def watch() -> None:
    """Watch the other processes, if this one has joined some; a second call does nothing."""
    store, process = get_store(), get_process_of_job()
    if store is not None and process is not None:
        start_watching(process, store, get_settings())
