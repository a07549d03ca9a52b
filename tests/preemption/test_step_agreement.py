"""The agreement on a run, between threads that are the processes of a job."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist._preemption import step_agreement
from jaxdist._preemption.notices import Notices
from jaxdist._preemption.step_agreement import FINAL, FIRST, StepAgreement
from jaxdist._processes import LocalStore, Process
from jaxdist.errors import DeadlineExceededError, UnavailableError


class Notice(Notices):
    """A notice that a test gives."""

    reason = "planted"

    def give(self) -> None:
        """Tell this process to end."""
        self.time = time.monotonic()

    def stop(self) -> None:
        """Do nothing."""


class Job:
    """Agreements of all processes of a job, which share a store."""

    def __init__(self, count: int, grace: float = 0.0, limit: float = 30.0) -> None:
        self.store = LocalStore()
        self.notices = [Notice() for _ in range(count)]
        self.agreements = [
            StepAgreement(self.store, Process(i, count), "key", notice, 0, grace, limit)
            for i, notice in enumerate(self.notices)
        ]

    def stop(self) -> None:
        """End all threads."""
        for agreement in self.agreements:
            agreement.stop()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that are stopped at the end."""
    made: list[Job] = []
    yield made
    for job in made:
        job.stop()


def _run_until_save(agreement: StepAgreement, seconds: float) -> int:
    while not agreement.start_run():
        time.sleep(seconds)
    return agreement.started


def _run_all(job: Job, seconds: list[float]) -> list[int]:
    results = [-1] * len(seconds)

    def run(index: int) -> None:
        results[index] = _run_until_save(job.agreements[index], seconds[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(seconds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(0.001, 0.01), min_size=2, max_size=4),
    st.sets(st.integers(0, 3), min_size=1),
    st.integers(0, 5),
)
def test_processes_of_any_speed_agree_on_one_run_that_none_has_passed(
    seconds: list[float], culprits: set[int], apart: int
) -> None:
    job = Job(len(seconds))
    try:
        for _ in range(apart):
            assert not job.agreements[0].start_run()
        for culprit in culprits:
            job.notices[culprit % len(seconds)].give()
        results = _run_all(job, seconds)
        assert len(set(results)) == 1
        assert results[0] > apart
        assert job.agreements[0].leader in {c % len(seconds) for c in culprits}
    finally:
        job.stop()


def test_the_second_round_is_started_by_the_leader_alone(jobs: list[Job]) -> None:
    jobs.append(job := Job(2, grace=60.0))
    job.notices[1].give()
    (first,) = set(_run_all(job, [0.001, 0.001]))
    for index, agreement in enumerate(job.agreements):
        assert (agreement.leader, agreement.reason, agreement.round) == (1, "planted", FIRST)
        # The time of the process that does not lead has no effect.
        agreement.start_final_round(time.monotonic() + (0.3 if index == 1 else -100))
        assert agreement.round == FINAL
    (last,) = set(_run_all(job, [0.001, 0.001]))
    assert last > first + 20


def test_the_grace_period_of_the_leader_is_that_of_all() -> None:
    job = Job(2)
    try:
        job.agreements[1].grace = 60.0
        job.notices[1].give()
        _run_all(job, [0.001, 0.001])
        assert [agreement.grace for agreement in job.agreements] == [60.0, 60.0]
    finally:
        job.stop()


def test_a_process_that_has_stopped_is_not_awaited(jobs: list[Job]) -> None:
    jobs.append(job := Job(2))
    for agreement in job.agreements:
        assert not agreement.start_run()
    job.agreements[1].stop()
    job.notices[0].give()
    assert _run_until_save(job.agreements[0], 0.001) >= 2


def test_a_process_that_has_ended_is_an_error_that_names_it(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_agreement, "find_ended", lambda: {1: "signal SIGKILL"})
    monkeypatch.setattr(step_agreement.StepAgreement, "_write_count", _write_only_of_0)
    jobs.append(job := Job(2))
    job.notices[0].give()
    with pytest.raises(UnavailableError, match="process 1 ended before it reported") as caught:
        _run_until_save(job.agreements[0], 0.001)
    assert caught.value.processes == (1,)


def test_a_process_that_does_not_answer_is_an_error_that_names_it(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_agreement.StepAgreement, "_write_count", _write_only_of_0)
    jobs.append(job := Job(2, limit=0.2))
    job.notices[0].give()
    with pytest.raises(
        DeadlineExceededError, match=r"process 1 did not report within 0\.2 s"
    ) as caught:
        _run_until_save(job.agreements[0], 0.001)
    assert caught.value.processes == (1,)


def _write_only_of_0(agreement: StepAgreement, name: str) -> None:
    if agreement._process.index == 0:
        agreement._store.set(f"{agreement._key}/{name}/at/0", "0", overwrite=True)


def test_a_process_that_stops_while_it_agrees_ends_its_thread(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_agreement.StepAgreement, "_write_count", _write_only_of_0)
    jobs.append(job := Job(2))
    job.notices[0].give()
    deadline = time.monotonic() + 30
    while not job.agreements[0]._is_agreeing:
        assert time.monotonic() < deadline
    job.agreements[0].stop()
    assert not job.agreements[0].start_run()


def test_a_service_that_has_gone_ends_the_thread_without_an_error(jobs: list[Job]) -> None:
    class Gone(LocalStore):
        def get(self, key: str) -> str | None:
            raise UnavailableError("gone")

        def set(self, key: str, text: str, *, overwrite: bool = False) -> None:
            raise UnavailableError("gone")

    agreement = StepAgreement(Gone(), Process(0, 2), "key", Notice(), 0, 0.0, 30.0)
    assert agreement._thread is not None
    agreement._thread.join(30)
    assert not agreement._thread.is_alive()
    assert not agreement.start_run()
    agreement.stop()
    agreement.stop()
