"""Real processes that are killed at a request of a save in a bucket, and others that continue."""

import functools
import itertools
import signal
import tempfile
import uuid
from typing import Any, NamedTuple

import pytest

from jaxdist._buckets import BucketPath
from jaxdist._checkpoints.bucket_storage import BucketStorage
from tests import tables
from tests.checkpoints.buckets import training
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, Proxy, use_store
from tests.processes.job import results_of_job, start_job


class _Row(NamedTuple):
    scheme: str
    processes: int
    # Whether the store does the request before the processes are killed.
    is_done: bool
    # The number of the request, from the end of the second save on.
    request: int

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.processes}-{'done' if self.is_done else 'lost'}-{self.request}"


# A save that deletes an older checkpoint takes up to 21 requests, or 30 of two processes.
_MOST = {1: 21, 2: 30}
_ROWS = [
    _Row(scheme, processes, is_done, request)
    for scheme, processes, is_done in itertools.product(SCHEMES, _MOST, (False, True))
    for request in range(1, _MOST[processes] + 1)
]


class _Killer:
    """Kills a job at a request after its second complete checkpoint."""

    def __init__(self, proxy: Proxy, row: _Row) -> None:
        self.proxy, self.row = proxy, row
        self.has_killed = False
        self._published, self._seen = 0, 0

    def start(self, folder: str) -> None:
        """Run the job until it is killed, or ends."""
        how = {"devices": 2 // self.row.processes, "env": {"JAXDIST_JOB_ID": folder}}
        with start_job(training.train, self.row.processes, args=(folder, None), **how) as self._job:
            self.proxy.fail = self._see
            self.proxy.cuts = self._see_done
            outcomes = self._job.wait(120)
        self.proxy.reset()
        for outcome in outcomes:
            wanted = -signal.SIGKILL if self.has_killed else 0
            assert (outcome.exit_code, outcome.timed_out) == (wanted, False), outcome.describe()

    def _see(self, number: int, method: str, key: str) -> int | None:
        if self._published < 2 or self.has_killed:
            return None
        self._seen += 1
        if self._seen < self.row.request or self.row.is_done:
            return None
        self._kill()
        return 0

    def _see_done(self, number: int, method: str, key: str) -> bool:
        if key.endswith("/checkpoints.json") and method in ("PUT", "POST"):
            self._published += 1
        is_due = self._seen >= self.row.request and self.row.is_done
        if is_due and not self.has_killed:
            self._kill()
            return True
        return False

    def _kill(self) -> None:
        self.has_killed = True
        for index in range(self.row.processes):
            self._job.kill(index)
        for index in range(self.row.processes):
            self._job.wait_for_end(index, 30)


@functools.cache
def _train_undisturbed(processes: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return results_of_job(
            training.train, processes, args=(folder, None), devices=2 // processes
        )


@pytest.mark.parametrize("row", tables.sampled(_ROWS, 6, name=lambda row: row.name))
def test_a_job_killed_at_a_request_of_a_save_continues_as_if_undisturbed(
    row: _Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = use_store(row.scheme, monkeypatch)
    name = uuid.uuid4().hex
    url, storage = (
        f"{row.scheme}://{BUCKET}/{name}",
        BucketStorage(BucketPath(row.scheme, BUCKET, name)),
    )
    how = {"devices": 2 // row.processes, "env": {"JAXDIST_JOB_ID": url}}
    killer = _Killer(proxy, row)
    killer.start(url)
    steps = storage.list_steps()
    assert steps in {(3, 6), (6, 9), (9, 12)}
    assert killer.has_killed or steps == (9, 12)
    results = results_of_job(training.train, row.processes, args=(url, None), **how)
    for result, wanted in zip(results, _train_undisturbed(row.processes), strict=True):
        assert result["first"] == steps[-1]
        assert result["whole"] == wanted["whole"]
        assert result["losses"] == {n: x for n, x in wanted["losses"].items() if n >= steps[-1]}
    assert storage.list_steps() == (9, 12)
    names = [n for n in storage.directory.list_names() if "/state/" in n]
    if steps[-1] < 12:
        assert {n.partition("/")[0] for n in names} == {"9", "12"}
        assert len({n.partition("/state/")[0] for n in names}) == 2, "what is left over is deleted"
