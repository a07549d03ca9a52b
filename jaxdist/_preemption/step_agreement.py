"""`StepAgreement`, with which all processes of a job agree after which run they save.

Note [Preemption]
~~~~~~~~~~~~~~~~~
JAX has such an agreement, `multihost_utils.reached_preemption_sync_point`. It works with the
processes that jaxdist joins, and can be started after joining. But it answers only once in a job,
so it cannot save again at the end of a grace period (a second manager fails with ALREADY_EXISTS);
it supports only SIGTERM, not `termination_watcher_fn`; it does not exist in a job of one process;
and SIGTERM has no effect after it is shut down. So the processes agree over the key-value store of
the job:

1. A process that gets a notice writes `<key>/first/notice`. The first process to write it leads.
2. A thread of each process reads it, blocks the next run, and writes how many runs this process has
   started. It does not need the main thread, which may be inside a run that waits for the others.
3. When all counts are written, runs continue. Each process saves when it has started one more run
   than the process that was furthest ahead, which no process can have passed.
4. With a grace period, the leader starts a second round, `<key>/final`, when the period ends.
"""

import contextlib
import json
import threading
import time

from jaxdist._preemption.notices import Notices
from jaxdist._processes import Process, Store, find_ended
from jaxdist.errors import DeadlineExceededError, OtherProcessError, UnavailableError

FIRST, FINAL = "first", "final"
_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 0.02
_STOP_SECONDS = 10.0


class StepAgreement:
    """Counts the runs of this process, and decides before which run all processes save.

    Args:
        store: The store of the job.
        process: This process.
        key: Prefix of the keys; the same in all processes, and used once.
        notices: Notices of this process.
        started: Number of runs before the last restart.
        grace: Seconds between a notice and the end.
        limit: How many seconds to wait for the counts of other processes.
    """

    def __init__(
        self,
        store: Store,
        process: Process,
        key: str,
        notices: Notices,
        started: int,
        grace: float,
        limit: float,
    ) -> None:
        self.started = started
        self.round = FIRST
        # Written by the process that leads: its index, its reason, and its grace period.
        self.leader: int | None = None
        self.reason = ""
        self.grace = grace
        # The time at which the leader starts the second round, by `time.monotonic`.
        self.final_at: float | None = None
        self._store = store
        self._process = process
        self._key = key
        self._notices = notices
        self._limit = limit
        self._target: int | None = None
        self._is_agreeing = False
        self._error: Exception | None = None
        self._gate = threading.Condition()
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        if process.count > 1:
            self._thread = threading.Thread(
                target=self._watch, name="jaxdist-preemption", daemon=True
            )
            self._thread.start()

    def start_run(self) -> bool:
        """Count a run that starts, or return True if all processes save now instead.

        Raises:
            OtherProcessError: A process that must agree has ended, or does not answer.
        """
        if self._notices.error is not None:
            raise self._notices.error
        if self._process.count == 1:
            self._agree_alone()
        with self._gate:
            if self._is_due():
                # The thread reads the notice; this run still starts.
                self._wake.set()
            self._gate.wait_for(lambda: not self._is_agreeing)
            if self._error is not None:
                raise self._error
            if self._target is not None and self.started >= self._target:
                return True
            self.started += 1
            return False

    def take_back(self) -> None:
        """Subtract the last run from the count, since it failed."""
        with self._gate:
            self.started -= 1

    def has_notice(self) -> bool:
        """Whether this process knows of a notice, its own or that of another process."""
        return self._notices.time is not None or self.leader is not None

    def get_notice_time(self) -> float:
        """Return the time at which this process got its notice, or the present time without one."""
        return time.monotonic() if self._notices.time is None else self._notices.time

    def start_final_round(self, at: float | None) -> None:
        """Continue after the first save; the leader starts the second round at the time `at`."""
        with self._gate:
            self.round, self._target = FINAL, None
            self.final_at = at if self.leader == self._process.index else None

    def stop(self) -> None:
        """End the thread. The other processes no longer wait for the count of this one."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wake.set()
        if self._thread is None:
            return
        self._thread.join(_STOP_SECONDS)
        # If the service has ended, so has every process that could wait.
        with contextlib.suppress(OtherProcessError):
            for name in (FIRST, FINAL):
                self._write_count(name)

    def _is_due(self) -> bool:
        if self.round == FIRST:
            return self._notices.time is not None
        return self.final_at is not None and time.monotonic() >= self.final_at

    def _agree_alone(self) -> None:
        with self._gate:
            if self._target is None and self._is_due():
                self.leader, self.reason = 0, self._notices.reason
                self._target = self.started + 1

    def _watch(self) -> None:
        try:
            while not self._is_stopped:
                self._wake.wait(_LOOK_SECONDS)
                self._wake.clear()
                self._look()
        except Exception as error:
            with self._gate:
                # If the job ends for another reason, do not raise: the service ends with process 0.
                is_needed = self._is_agreeing or not isinstance(error, UnavailableError)
                self._error = error if is_needed else None
                self._is_agreeing = False
                self._gate.notify_all()

    def _look(self) -> None:
        """Agree on a run if a notice exists that this process has not answered yet."""
        if self._target is not None or self._is_stopped:
            return
        round_now = self.round
        notice_key = f"{self._key}/{round_now}/notice"
        if self._is_due():
            notice = {
                "process": self._process.index,
                "reason": self._notices.reason,
                "grace": self.grace,
            }
            # If another process wrote the notice first, that one leads.
            with contextlib.suppress(KeyError):
                self._store.set(notice_key, json.dumps(notice))
        text = self._store.get(notice_key)
        if text is None:
            return
        notice = json.loads(text)
        with self._gate:
            self._is_agreeing = True
        self._write_count(round_now)
        counts = self._wait_for_counts(round_now)
        with self._gate:
            if round_now == FIRST:
                self.leader, self.reason = int(notice["process"]), str(notice["reason"])
                self.grace = float(notice["grace"])
            self._target = None if counts is None else max(counts) + 1
            self._is_agreeing = False
            self._gate.notify_all()

    def _write_count(self, name: str) -> None:
        # The count of this round may be written already.
        with contextlib.suppress(KeyError):
            self._store.set(f"{self._key}/{name}/at/{self._process.index}", str(self.started))

    def _wait_for_counts(self, name: str) -> list[int] | None:
        """Return the number of runs that each process has started; None if this process stops."""
        prefix = f"{self._key}/{name}/at"
        end = time.monotonic() + self._limit
        while not self._is_stopped:
            found = self._store.list(f"{prefix}/")
            missing = [i for i in range(self._process.count) if f"{prefix}/{i}" not in found]
            if not missing:
                return [int(text) for text in found.values()]
            ended = [i for i in find_ended() if i in missing]
            # A process that ends normally writes its count first, so look again.
            found = self._store.list(f"{prefix}/") if ended else {}
            ended = [i for i in ended if f"{prefix}/{i}" not in found]
            if ended:
                raise UnavailableError(_describe(ended, "ended before it reported"), ended)
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    _describe(missing, f"did not report within {self._limit:g} s"), missing
                )
            time.sleep(_WAIT_SECONDS)
        return None


def _describe(processes: list[int], what: str) -> str:
    who = ", ".join(f"process {i}" for i in processes)
    return (
        f"PreemptionCheckpointHandler: {who} {what} how many runs it has started.\n\n"
        "Before a job is ended, all its processes agree after which run they save.\n\n"
        "Make the handler in every process, and look at what that process does instead. The job "
        "restarts from the previous checkpoint."
    )
