"""`Supervisor`: what ends at the same time is decided in the order of the tasks."""

import pathlib
from collections.abc import Mapping
from typing import IO, Any

from jaxdist._launching.child import End
from jaxdist._launching.cluster.supervisor import Supervisor, Task
from jaxdist._launching.processes import AnyChild, Patience
from jaxdist._launching.signals import collect_signals


class _Child(AnyChild):
    """A process that ends with a code when `collect` is called for the k-th time."""

    def __init__(self, index: int, code: int, calls: int) -> None:
        self.index, self.end = index, None
        self._code, self._calls = code, calls

    @property
    def streams(self) -> Mapping[IO[bytes], Any]:
        return {}

    def collect(self) -> End | None:
        self._calls -= 1
        return End(self.index, self._code) if self._calls <= 0 else None

    def ask_to_end(self) -> None:
        self._calls = 0

    def read(self, pipe: IO[bytes]) -> bool:
        raise AssertionError("it has no streams")

    def signal(self, number: int, *, to_group: bool = False) -> None:
        raise AssertionError("no signal came")

    def kill(self) -> None: ...

    def hear(self, end: End) -> None: ...

    def abandon(self) -> None: ...


def test_a_restarted_worker_that_fails_together_with_the_chief_is_the_first_cause(
    tmp_path: pathlib.Path,
) -> None:
    codes = {1: (-9, 1), 2: (3, 2)}
    worker = Task("worker", 0, lambda start: _Child(1, *codes[start]), tmp_path)
    chief = Task("chief", 0, lambda start: _Child(0, 0, 3), tmp_path)
    with collect_signals(()) as signals:
        code = Supervisor([worker, chief], signals, Patience(grace=0.1), restarts=0).run()
    assert worker.starts == 2
    assert code == 3
