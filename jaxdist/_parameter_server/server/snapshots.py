"""Snapshots of a server: what they hold, how they are written and read, and when."""

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxdist._called import called
from jaxdist._checkpoints import (
    Checkpoints,
    JobLock,
    find_damage,
    list_steps,
    read_saved_notes,
)
from jaxdist._parameter_server.server.programs import UpdateProgram
from jaxdist._parameter_server.server.state import CountedClosures, Restore, State, make_incarnation
from jaxdist._parameter_server.server.stored import StoredVariable
from jaxdist._validate import format_lines
from jaxdist.errors import CheckpointError, DamagedCheckpointError, UnavailableError

_KEEP = 2
_FORMAT = 2
_LOG = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True)
class Captured:
    """The content of a snapshot: all of one moment, between two requests."""

    arrays: dict[str, np.ndarray]
    notes: dict[str, Any]
    mutations: int  # that of the state, to see whether something changed since


def capture(state: State, task: str) -> Captured:
    """Return what a snapshot holds. The caller has the lock of the server.

    Cost:
        A copy of each table; other values are not written into, so they are not copied.
    """
    # The names of variables are in the notes, since they may contain any character.
    arrays = {f"v{i}": stored.read() for i, stored in enumerate(state.variables.values())}
    for i, program in enumerate(state.programs.values()):
        arrays[f"p{i}"] = np.frombuffer(program.content, np.uint8)
    # Orbax refuses an empty checkpoint.
    arrays["format"] = np.full(1, _FORMAT, np.int32)
    variables = [
        {
            "name": stored.name,
            "version": stored.version,
            "creator": stored.creator,
            "dtype": stored.dtype.name,
            "shape": list(stored.shape),
        }
        for stored in state.variables.values()
    ]
    programs = [
        {"key": p.key, "num_slots": p.num_slots, "bytes": len(p.content)}
        for p in state.programs.values()
    ]
    notes = {
        "format": _FORMAT,
        "task": task,
        "variables": variables,
        "programs": programs,
        "slots": [[name, key, list(own)] for (name, key), own in state.slots.items()],
        "counted": state.counted.to_json(),
        "applied": state.applied,
        "already_counted": state.already_counted,
        "staleness": list(state.staleness.items()),
        "staleness_of": {name: list(own.items()) for name, own in state.staleness_of.items()},
        "incarnation": state.incarnation,
        "restores": [[r.incarnation, r.counted] for r in state.restores],
        "max_staleness": state.max_staleness,
    }
    return Captured(arrays, notes, state.mutations)


def _make_like(notes: dict[str, Any]) -> dict[str, Any] | None:
    """Return shapes and dtypes of the arrays; None if the notes are not those of a snapshot."""
    try:
        like: dict[str, Any] = {
            f"v{i}": jax.ShapeDtypeStruct(tuple(row["shape"]), np.dtype(row["dtype"]))
            for i, row in enumerate(notes["variables"])
        }
        for i, row in enumerate(notes["programs"]):
            like[f"p{i}"] = jax.ShapeDtypeStruct((row["bytes"],), np.dtype(np.uint8))
    except (LookupError, TypeError, ValueError):
        return None
    return like | {"format": jax.ShapeDtypeStruct((1,), np.dtype(np.int32))}


@called("VariableServer")
def _make_state(notes: dict[str, Any], arrays: dict[str, Any], path: str) -> State:
    restores = [Restore(*row) for row in notes["restores"]]
    incarnation = make_incarnation(notes["incarnation"])
    state = State(
        incarnation=incarnation,
        restores=[*restores, Restore(incarnation, notes["counted"])],
        max_staleness=notes["max_staleness"],
        counted=CountedClosures.from_json(notes["counted"]),
        slots={(name, key): tuple(own) for name, key, own in notes["slots"]},
        applied=notes["applied"],
        already_counted=notes["already_counted"],
        staleness=Counter(dict(notes["staleness"])),
        staleness_of={n: Counter(dict(own)) for n, own in notes.get("staleness_of", {}).items()},
    )
    for i, row in enumerate(notes["variables"]):
        name, version = row["name"], row["version"]
        state.variables[name] = StoredVariable(
            name, arrays[f"v{i}"], version, row["creator"], start_version=version, snapshot=path
        )
    for i, row in enumerate(notes["programs"]):
        content = np.asarray(arrays[f"p{i}"]).tobytes()
        program = UpdateProgram(row["key"], content, row["num_slots"])
        state.programs[row["key"]] = program
    return state


class SnapshotKeeper:
    """The snapshots of one server: written in a thread, and on request.

    Args:
        directory: The folder of the job. Each server has a folder in it, named by its task.
        task: The name of the task.
        seconds: How often.
        capture: Returns what a snapshot holds; None if the mutations of the state are as given.

    Attributes:
        state: The state of the newest snapshot, or an empty one.
        start_from: The number and folder of that snapshot; None if there was none.

    Raises:
        DamagedCheckpointError: The files of the newest snapshot are not as they were written.
        CheckpointError: The folder cannot be used, or another job serves from it; or its snapshot
            is one of another server, or of another version.
    """

    def __init__(
        self,
        directory: Path,
        task: str,
        seconds: float,
        capture: Callable[[int | None], Captured | None],
    ) -> None:
        self._task, self._seconds, self._capture = task, seconds, capture
        self._folder = directory / task.replace(":", "_").replace("/", "_")
        self._checkpoints = Checkpoints(self._folder, keep=_KEEP)
        # Locked from the start, so that no second server restores what this one will replace.
        self._of_job = JobLock(self._folder)
        self._of_job.__enter__()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._saved: dict[str, Any] = {}
        self._saved_mutations = 0
        self._took = 0.0
        self._failure: str | None = None
        self.state, self.start_from = State(), None
        try:
            if steps := list_steps(self._folder):
                self.state = self.load(steps[-1])
                self.start_from = {
                    "step": steps[-1],
                    "folder": str(self._folder),
                    "applied": self.state.applied,
                }
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(
            target=self._run, name=f"jaxdist-snapshots-{task}", daemon=True
        )

    def load(self, step: int) -> State:
        """Return the state in a snapshot."""
        path = self._checkpoints.path(step)
        notes = read_saved_notes(self._folder, step)
        like = _make_like(notes or {})
        if notes is None or like is None:
            problems = find_damage(self._folder, step) or ["Its notes cannot be read."]
            raise self._make_damage_error(step, problems)
        if notes["format"] != _FORMAT or notes["task"] != self._task:
            raise CheckpointError(
                f"VariableServer: {path} is a snapshot of other variables: of task "
                f"{notes['task']!r} in format {notes['format']}.\n\n"
                f"This server is {self._task!r}, and reads format {_FORMAT}.\n\n"
                "Start the server of that task with it, or use another snapshot_directory."
            )
        cpu = SingleDeviceSharding(jax.devices("cpu")[0])
        try:
            restored = self._checkpoints.restore(step, like=like, sharding=cpu)
        except DamagedCheckpointError as error:
            problems = str(error).partition("\n\n")[0].splitlines()[1:]
            raise self._make_damage_error(step, problems) from error
        return _make_state(notes, restored.state, str(path))

    def _make_damage_error(self, step: int, problems: list[str]) -> DamagedCheckpointError:
        path = self._checkpoints.path(step)
        before = [s for s in list_steps(self._folder) if s < step]
        rest = (
            f"to serve from the one before, {before[-1]}"
            if before
            else "to start with new variables"
        )
        return DamagedCheckpointError(
            f"VariableServer: snapshot {path} is damaged:\n{format_lines(problems)}\n\n"
            "A server serves from its newest snapshot, if its files are as they were written.\n\n"
            f"Copy it back from elsewhere, or move it away {rest}."
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        # Compiled here, so that neither the start of the server nor the first change waits for it.
        for program in list(self.state.programs.values()):
            program.compile()
        while not self._is_closed.wait(self._find_pause()):
            try:
                self.save(only_if_changed=True)
            except (CheckpointError, UnavailableError) as error:
                _LOG.error("A snapshot of %s could not be written: %s", self._task, error)

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
            steps = list_steps(self._folder)
            step = steps[-1] + 1 if steps else 0
            try:
                self._checkpoints.save(step, captured.arrays, captured.notes)
                self._checkpoints.wait_until_finished()
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
            self._release()

    def _release(self) -> None:
        self._checkpoints.close()
        self._of_job.close()
