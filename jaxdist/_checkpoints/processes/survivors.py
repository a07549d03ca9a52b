"""Saves the last complete step when a collective fails because other processes have ended."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist._checkpoints.files import list_steps
from jaxdist._checkpoints.orbax import write_as_first_process
from jaxdist._checkpoints.processes.parts import prepare_folder, publish, start_part
from jaxdist._checkpoints.processes.snapshots import NoCopyError, Snapshots
from jaxdist._processes import Process, find_ended, get_current_process
from jaxdist.errors import OtherProcessError

_LOG = logging.getLogger("jaxdist")


class Survivor:
    """Saves the last complete step of a training into one directory, at most once.

    Args:
        directory: The directory of the checkpoints.
        keep: How many of the newest checkpoints to keep.
        prepare: A function that waits until no thread writes there, and takes the lock.
        callback: As for `Snapshots`.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        prepare: Callable[[], None],
        callback: Callable[[], Any],
    ) -> None:
        self._directory, self._keep, self._prepare = directory, keep, prepare
        self._snapshots = Snapshots(callback)
        self._said: str | None = None

    def take(self) -> None:
        """Keep the state before the next step."""
        self._snapshots.take()

    def act(self, error: OtherProcessError) -> str:
        """Save the last complete step, if this process is chosen; return a report for the user."""
        if self._said is None:
            try:
                self._said = self._save(error)
            except NoCopyError as reason:
                self._said = self._point_to_last(str(reason))
            except Exception as failure:
                line = str(failure).partition("\n")[0]
                self._said = self._point_to_last(f"{type(failure).__name__}: {line}")
            _LOG.warning("%s", self._said)
        return self._said

    def _save(self, error: OtherProcessError) -> str:
        process = get_current_process()
        ended: dict[int, str] = {}
        try:
            ended = find_ended()
        except Exception:
            _LOG.debug("The coordination service has ended as well.")
        left = [i for i in range(process.count) if i not in error.processes and i not in ended]
        # All processes make the same choice. If two choose themselves, the second finds a complete
        # checkpoint.
        writer = min(left, default=process.index)
        step, leaves, notes = self._snapshots.find_newest()
        if writer != process.index:
            return (
                f"The last complete step is {step}. Process {writer} saves it in {self._directory}."
            )
        self._prepare()
        steps = list_steps(self._directory)
        if steps and steps[-1] > step:
            # From an earlier training that continued for longer, or from another survivor.
            raise NoCopyError(
                f"the last complete step is {step}, and checkpoint {steps[-1]} exists"
            )
        if step not in steps:
            self._write(step, leaves, notes)
        return f"The last complete step is saved: {self._directory / str(step)}."

    def _write(self, step: int, leaves: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        own = get_current_process().index
        folder = prepare_folder(self._directory, step, f"survivor{own}")
        with write_as_first_process():
            start_part(folder, leaves, notes, Process(0, 1), own)()
        publish(self._directory, folder, step, self._keep, own)

    def _point_to_last(self, reason: str) -> str:
        steps = list_steps(self._directory)
        last = f"The last checkpoint counts: {self._directory / str(steps[-1])}." if steps else ""
        return (
            f"Nothing was saved now: {reason}. "
            f"{last or f'There is no checkpoint in {self._directory}.'}"
        )


_active: list[Survivor] = []


def add_survivor(survivor: Survivor) -> None:
    """Register a survivor for the steps of all strategies over several processes."""
    _active.append(survivor)


def remove_survivor(survivor: Survivor) -> None:
    """Undo `add_survivor`."""
    if survivor in _active:
        _active.remove(survivor)


def keep_states() -> None:
    """Keep the state before the next step, for each registered survivor."""
    for survivor in _active:
        survivor.take()


def save_after(error: OtherProcessError) -> None:
    """Save the last complete step, and report it in the message of the error."""
    for survivor in list(_active):
        said = survivor.act(error)
        if said not in str(error):
            error.args = (f"{error}\n\n{said}",)
