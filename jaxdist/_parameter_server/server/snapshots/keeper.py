"""`SnapshotKeeper`: when snapshots are written, and the one that a server begins with."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdist._parameter_server.server.snapshots.files import Captured, Snapshots
from jaxdist._parameter_server.server.state import State
from jaxdist.errors import CheckpointError, UnavailableError

_LOG = logging.getLogger("jaxdist")


class SnapshotKeeper:
    """Writes the snapshots of a server in a thread, and on request.

    Args:
        directory: The folder of the snapshots of all servers of the job.
        task: The name of the task.
        seconds: How often.
        capture: Returns what a snapshot holds; None if the mutations of the state are as given.

    Attributes:
        state: The state of the newest snapshot, or an empty one.
        start_from: The number and folder of that snapshot; None if there was none.
    """

    def __init__(
        self,
        directory: Path,
        task: str,
        seconds: float,
        capture: Callable[[int | None], Captured | None],
    ) -> None:
        self._task, self._seconds, self._capture = task, seconds, capture
        self._snapshots = Snapshots(directory, task)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._saved: dict[str, Any] = {}
        self._saved_mutations = 0
        self._took = 0.0
        self._failure: str | None = None
        self.state, self.start_from = State(), None
        try:
            newest = self._snapshots.find_newest()
            if newest is not None:
                self.state = self._snapshots.load(newest)
                self.start_from = {
                    "step": newest,
                    "folder": str(self._snapshots.folder),
                    "applied": self.state.applied,
                }
        except BaseException:
            self._snapshots.close()
            raise
        self._thread = threading.Thread(
            target=self._run, name=f"jaxdist-snapshots-{task}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        # The first change would otherwise wait for it, and the server should answer soon.
        for program in list(self.state.programs.values()):
            program.compile()
        while not self._is_closed.wait(self._find_pause()):
            try:
                self.save(only_if_changed=True)
            except (CheckpointError, UnavailableError) as error:
                _LOG.error("A snapshot of %s is missing: %s", self._task, error)

    def _find_pause(self) -> float:
        """Return how long to wait, so that the newest snapshot is never older than one period.

        A snapshot has the values of when it was begun, and counts when it is complete. One that
        takes longer than the period leaves as much time to the disk as it took.
        """
        return max(self._seconds - 2 * self._took, min(self._took, self._seconds))

    def save(self, *, only_if_changed: bool = False) -> dict[str, Any]:
        """Write a snapshot, and return its number and how many requests it has.

        Raises:
            CheckpointError: It cannot be written.
        """
        with self._lock:
            began = time.monotonic()
            captured = self._capture(self._saved_mutations if only_if_changed else None)
            if captured is None:
                return self._saved
            try:
                step = self._snapshots.save(captured)
            except CheckpointError as error:
                self._failure = str(error)
                raise
            self._saved_mutations, self._failure = captured.mutations, None
            self._took = time.monotonic() - began
            self._saved = {"step": step, "applied": captured.notes["applied"]}
            return self._saved

    def describe(self) -> dict[str, Any]:
        """Return the last snapshot of this incarnation, and why a later one failed."""
        return {"saved": self._saved, "failure": self._failure}

    def close(self) -> None:
        """Write a last snapshot if something changed, and release the folder."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        try:
            self.save(only_if_changed=True)
        finally:
            self._snapshots.close()
