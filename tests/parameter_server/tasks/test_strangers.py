"""Requests that no client of jaxdist makes, to the server of a job that trains."""

import itertools
import math
import statistics
import threading
from collections.abc import Callable

import pytest

from tests.parameter_server.tasks.cluster import SCRIPT, SECRET, Task, make_cluster
from tests.parameter_server.transport.stranger import Stranger
from tests.parameter_server.transport.test_strangers import MOST_MEMORY, resident

pytestmark = pytest.mark.slow

# What strangers send in a second. More would measure how fast they are on the same two cores.
RATE = 100


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_malformed_requests_while_a_job_trains_change_nothing(
    count: int, record_property: Callable[[str, object], None]
) -> None:
    with make_cluster("50", script=SCRIPT.with_name("rounds_script.py")) as cluster:
        chief = cluster.start_all()
        for _ in range(3):
            chief.wait_for("round")
        server = cluster.tasks["ps 0"].process
        before = most = resident(server.pid)
        stranger = Stranger(cluster.addresses["ps"][0], SECRET, count)
        alone: list[float] = []
        beside: list[float] = []
        left = count
        while left:
            alone.append(_next_round(chief))
            now = min(left, max(20, count // 9))
            attack = _Attack(stranger, now)
            while attack.goes_on():
                beside.append(_next_round(chief))
                most = max(most, resident(server.pid))
            attack.join()
            left -= now
            # The round in which it ended is neither.
            _next_round(chief)
        chief.tell()
        end = chief.wait_for("end")
        stranger.close()
        assert server.poll() is None
    assert end["count"] == end["applied"] == end["scheduled"]
    assert end["lost"] == 0
    assert all(map(math.isfinite, end["sums"]))
    assert most - before <= MOST_MEMORY
    ratio = statistics.median(alone) / statistics.median(beside)
    record_property("steps per second beside strangers, to those without", ratio)
    print(f"{count} requests: {ratio:.2f} of the steps/s without; + {most - before:,} bytes")


def _next_round(chief: Task) -> float:
    return float(chief.wait_for("round")["seconds"])


class _Attack:
    """Requests in a thread, `RATE` in a second."""

    def __init__(self, stranger: Stranger, count: int) -> None:
        self._stranger, self._count = stranger, count
        self._error: BaseException | None = None
        self._pace = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in itertools.repeat(None, self._count):
                self._stranger.ask()
                self._pace.wait(1 / RATE)
        except BaseException as error:
            self._error = error

    def goes_on(self) -> bool:
        """Whether there are requests to come."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end, and raise what was raised."""
        self._thread.join(300)
        if self._error is not None:
            raise self._error
