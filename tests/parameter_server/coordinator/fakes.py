"""A strategy and workers in this process: functions run with NumPy, and calls fail as told."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist._parameter_server.coordinator import Fence, IteratorOf, ServerReport
from jaxdist.coordinator import ClusterCoordinator, PerWorkerValues
from jaxdist.errors import CancelledError

SECONDS = 30.0


def wait_for(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until something holds, at most `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what or condition} does not hold after {SECONDS} s"
        time.sleep(0.001)


class Counter:
    """A variable on a server that counts each closure once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        self.seen: set[int] = set()
        self.sent = 0

    def add(self, number: int, done_below: int) -> None:
        """Add 1 for a closure that is new."""
        with self._lock:
            self.sent += 1
            if number >= done_below and number not in self.seen:
                self.value += 1
            self.seen.add(number)


@dataclasses.dataclass
class Call:
    """What a link was called with."""

    number: int
    fence: int
    done_below: int


class FakeLink:
    """A worker in this process.

    `failures` are errors of its first, second, ... calls of `run`; None is no error. With `after`,
    the closure has changed the counter before the error is raised.
    """

    def __init__(self, index: int, counter: Counter | None = None) -> None:
        self.index = index
        self.counter = counter or Counter()
        self.calls: list[Call] = []
        self.failures: dict[int, BaseException] = {}
        self.resource_failures: list[BaseException | None] = []
        self.after = False
        self.is_back = threading.Event()
        self.is_back.set()
        self.cancelled: set[int] = set()
        self.resources: list[Any] = []

    def run(self, closure: Any, number: int, fence: int, done_below: int) -> Any:
        """Run a closure here."""
        self.calls.append(Call(number, fence, done_below))
        error = self.failures.pop(len(self.calls), None)
        if error is not None and not self.after:
            raise error
        fn, args, kwargs = closure
        args = [a.of(self.index) if isinstance(a, PerWorkerValues) else a for a in args]
        results = fn(*args, **kwargs)
        self.counter.add(number, done_below)
        if error is not None:
            raise error
        return results

    def wait_until_back(self, seconds: float) -> bool:
        """Wait for `is_back`."""
        return self.is_back.wait(seconds)

    def create_resource(self, resource: Any) -> Any:
        """Call a dataset function, or make an iterator."""
        error = self.resource_failures.pop(0) if self.resource_failures else None
        if error is not None:
            raise error
        made = iter(resource.dataset) if isinstance(resource, IteratorOf) else resource()
        self.resources.append(made)
        return made

    def cancel(self, number: int) -> None:
        """Note it; closures look with `check`."""
        self.cancelled.add(number)

    def check(self) -> None:
        """Raise if the closure that runs was cancelled."""
        if self.calls[-1].number in self.cancelled:
            raise CancelledError("stopped\n\nrule\n\nremedy")


class FakeJoining:
    """Adds the workers that a test has made; `announced` are those that announce themselves."""

    has_announcements = True

    def __init__(self) -> None:
        self.to_add: list[FakeLink] = []
        self.announced: list[FakeLink] = []

    def add(self, address: str | None) -> tuple[FakeLink, bool]:
        """Return the next worker."""
        return self.to_add.pop(0), True

    def find_new(self) -> list[FakeLink]:
        """Return those that have announced themselves."""
        found, self.announced = self.announced, []
        return found


class FakeStrategy:
    """A strategy whose workers are in this process."""

    def __init__(self, workers: int = 2) -> None:
        self._cluster_coordinator: Any = None
        self._fence = Fence()
        self.counter = Counter()
        self._links = [FakeLink(i, self.counter) for i in range(workers)]
        self.report = ServerReport()
        self.new_workers = FakeJoining()

    def links(self) -> list[FakeLink]:
        """The workers."""
        return self._links

    def joining(self) -> FakeJoining:
        """What adds workers."""
        return self.new_workers

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Keep the call as it is."""
        return fn, args, kwargs

    def make_per_worker(self, dataset_or_fn: Any) -> Any:
        """Return the dataset function."""
        return dataset_or_fn if callable(dataset_or_fn) else lambda: dataset_or_fn

    def report_changes(self, staleness: dict[int, int], *, lost: int) -> None:
        """Let the servers report changes by their staleness, and how many were lost."""
        self.report = ServerReport(staleness, lost=lost)

    def report_of_servers(self) -> ServerReport:
        """What the test has set."""
        return self.report


def count_threads(coordinator: ClusterCoordinator) -> int:
    """How many threads of a coordinator are alive."""
    return sum(t.thread.is_alive() for t in coordinator._workers.threads)
