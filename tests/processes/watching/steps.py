"""What the processes of these tests run: a reduction in which one of them does not take part."""

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _processes, errors
from jaxdist._processes import HERE, CallOfAll, Waiter

# XLA computes small programs inside of the call that dispatches them, and large ones in a thread.
SMALL, LARGE = 4, 4096
STEP = 7


class Member:
    """One process of a job, which has joined the others and has reduced once with them."""

    def __init__(self, size: int) -> None:
        config = json.loads(os.environ["TF_CONFIG"])
        self.count = len(config["cluster"]["worker"])
        self.index = int(config["task"]["index"])
        _processes.connect(
            coordinator_address=os.environ["JAXDIST_SERVICE"],
            num_processes=self.count,
            process_id=self.index,
            cluster_detection_method="deactivate",
            coordinator_bind_address="127.0.0.1:0",
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=5,
        )
        process, store = _processes.get_process_of_job(), _processes.get_store()
        assert process is not None
        assert store is not None
        _processes.start_watching(process, store, _processes.get_settings())
        mesh = jax.make_mesh((self.count,), ("x",))
        rows = NamedSharding(mesh, PartitionSpec("x"))
        ones = np.ones((1, size), np.float32)
        self._x = jax.make_array_from_process_local_data(rows, ones)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._add = jax.jit(lambda x: x.sum(0), out_shardings=everywhere)
        self._calls = CallOfAll("reduce")
        assert self.reduce() == self.count
        HERE.enter("step", STEP)
        HERE.leave()

    def dispatch(self) -> jax.Array:
        """Add ones over all processes, without waiting for the sum."""
        return self._add(self._x)

    def reduce(self, seconds: float | None = None) -> float:
        """Add ones over all processes."""
        with Waiter("the test's reduce", self._calls.name_next(), seconds) as waiter:
            total = self.dispatch()
            waiter.wait([total])
        return float(total[0])


def catch(do: Callable[[], Any]) -> dict[str, Any]:
    """Return what an error about other processes says, and that this process can go on."""
    began = time.monotonic()
    try:
        do()
    except errors.OtherProcessError as error:
        caught = {
            "kind": type(error).__name__,
            "processes": error.processes,
            "text": str(error),
            "seconds": time.monotonic() - began,
        }
    else:
        caught = {"kind": "no error"}
    return {**caught, "local": float(jnp.arange(4.0).sum())}


def be_late(how: str) -> None:
    """Do something else than the other processes."""
    if how == "loops":
        while True:
            pass
    if how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "holds the GIL":
        ctypes.PyDLL(None).sleep(1000)
    if how == "has caught an exception":
        try:
            raise ValueError("no rows")
        except ValueError:
            time.sleep(1000)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        sys.exit(0)
    if how == "raises":
        raise ValueError("no rows")


def reduce_with_late(how: str, late: int, size: int, seconds: float | None) -> dict[str, Any]:
    """Reduce in all processes but one, and return what the error says."""
    member = Member(size)
    if member.index == late:
        # The others are inside of the collective by then, and have said so.
        time.sleep(0.2)
        be_late(how)
    return catch(lambda: member.reduce(seconds))


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        store, process = _processes.get_store(), _processes.get_process_of_job()
        if store is not None and process is not None:
            store.set(f"test/logged/{process.index}", "", overwrite=True)


def collect_reports(late: int, is_plain: bool) -> list[str]:
    """Reduce late, when every process has logged a report; return the reports of this process.

    Args:
        late: The process that comes only then.
        is_plain: Whether the others wait in `float(array)`, outside of jaxdist.
    """
    records = _Records()
    logging.getLogger("jaxdist").addHandler(records)
    member = Member(LARGE)
    if member.index == late:
        store = _processes.get_store()
        assert store is not None
        end = time.monotonic() + 30
        while len(store.list("test/logged/")) < member.count and time.monotonic() < end:
            pass
    total = float(member.dispatch()[0]) if is_plain else member.reduce()
    assert total == member.count
    return records.texts
