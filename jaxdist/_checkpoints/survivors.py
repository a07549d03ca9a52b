"""Keeps the last states of a training, and saves the last complete one if processes end."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse_type
from jaxdist._checkpoints.leaves import name_leaves, to_plain
from jaxdist._checkpoints.orbax import write_as_first_process
from jaxdist._checkpoints.parts import start_part
from jaxdist._checkpoints.storage import Storage
from jaxdist._compat import is_ready
from jaxdist._devices import runtime
from jaxdist._processes import Process, find_ended, get_current_process
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import VariableSynchronization, is_sharded_leaf, is_variable
from jaxdist.errors import OtherProcessError

Notes = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None

# Note [What a survivor saves]
# JAX dispatches steps ahead of the devices, so when an error is raised, the state that the script
# holds is the result of a step that failed. Therefore references to the state before each step are
# kept until a later state is computed. A survivor copies the newest computed state from the memory
# of its own devices, which takes no collective.
_MOST_ON_ACCELERATOR = 2
_PATIENCE_SECONDS = 2.0
_NAP = 0.01


class NoCopyError(ValueError):
    """This process has no full copy of the state; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state after a step.

    Args:
        step: The number of completed steps.
        leaves: Arrays by name, which may still be computed.
        notes: Notes of the checkpoint, or a function that returns them.
    """

    step: int
    leaves: dict[str, Any]
    notes: Notes

    def is_computed(self) -> bool:
        """Whether all arrays are computed, without an error."""
        arrays: list[Any] = [x for x in self.leaves.values() if isinstance(x, jax.Array)]
        if any(x.is_deleted() or not is_ready(x) for x in arrays):
            return False
        try:
            jax.block_until_ready(arrays)
        except Exception:
            # The step that computes them has failed.
            return False
        return True


class Snapshots:
    """The newest states of a training.

    Args:
        callback: A function that returns the step, the state, and optionally notes.
    """

    def __init__(self, callback: Callable[[], Any]) -> None:
        self._callback = callback
        self._kept: list[Snapshot] = []
        self._last: int | None = None
        self._reason = "no step has begun"

    def take(self) -> None:
        """Keep the state before the next step, and drop states older than a computed one.

        Raises:
            ArgumentTypeError: The callback does not return a step and a state.
        """
        step, state, notes = self._ask()
        if step == self._last:
            # A second program of the same step; the state may be partly updated.
            return
        computed = [i for i, kept in enumerate(self._kept) if kept.is_computed()]
        self._kept = self._kept[max(computed, default=0) :]
        most = _MOST_ON_ACCELERATOR
        if jax.default_backend() == "cpu":
            most = runtime.MAX_STEPS_IN_FLIGHT_ON_CPU + 1
        if len(self._kept) >= most:
            return
        self._last = step
        try:
            self._kept.append(Snapshot(step, _list_own_copies(state), notes))
        except NoCopyError as error:
            self._reason = str(error)

    def find_newest(self) -> tuple[int, dict[str, Any], Mapping[str, Any]]:
        """Return the step, the arrays on the host, and the notes of the newest complete state.

        Raises:
            NoCopyError: No complete state exists; the message gives the reason.
        """
        self.take()
        end = time.monotonic() + _PATIENCE_SECONDS
        for kept in reversed(self._kept):
            while not kept.is_computed() and time.monotonic() < end:
                time.sleep(_NAP)
                if any(x.is_deleted() for x in kept.leaves.values() if isinstance(x, jax.Array)):
                    self._reason = "a step has taken the memory of the state (donate)"
                    break
            if kept.is_computed():
                notes = kept.notes() if callable(kept.notes) else kept.notes
                return kept.step, {n: np.array(x) for n, x in kept.leaves.items()}, notes or {}
        raise NoCopyError(self._reason)

    @called("Checkpoints.on_failure")
    def _ask(self) -> tuple[int, PyTree, Notes]:
        found = self._callback()
        if not isinstance(found, tuple) or len(found) not in (2, 3) or type(found[0]) is not int:
            raise refuse_type(
                f"a callback that returned {show(found)}.",
                "It returns the number of completed steps and the state, as save takes them.",
                "Pass for instance lambda: (step, (model, optimizer)).",
            )
        return found if len(found) == 3 else (*found, None)


def _list_own_copies(state: PyTree) -> dict[str, Any]:
    """Return the arrays of a state by name, each as the copy on one device of this process.

    Raises:
        NoCopyError: A part of the state exists only in other processes.
    """
    # Each process holds its own sums of an `ON_READ` variable, and reading it takes a collective.
    for leaf in jax.tree.leaves(state, is_leaf=is_variable):
        if is_variable(leaf) and leaf.synchronization is VariableSynchronization.ON_READ:
            raise NoCopyError("a variable has a value of its own on each replica (ON_READ)")
    plain = to_plain(state)
    for leaf in jax.tree.leaves(plain, is_leaf=is_sharded_leaf):
        if is_sharded_leaf(leaf):
            raise NoCopyError("the state is in pieces, and this process has only its own")
    found: dict[str, Any] = {}
    for name, leaf in name_leaves(jax.tree.map(_take_own, plain)).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise NoCopyError(f"{name} is in pieces, and this process has only its own")
        found[name] = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    return found


def _take_own(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return leaf


_LOG = logging.getLogger("jaxdist")


class Survivor:
    """Saves the last complete step of a training into one directory, at most once.

    Args:
        storage: The checkpoints of the directory.
        keep: How many of the newest checkpoints to keep.
        prepare: A function that waits until no thread writes there, and takes the lock.
        callback: As for `Snapshots`.
    """

    def __init__(
        self,
        storage: Storage,
        keep: int,
        prepare: Callable[[], None],
        callback: Callable[[], Any],
    ) -> None:
        self._storage, self._keep, self._prepare = storage, keep, prepare
        self._directory = storage.directory
        self.snapshots = Snapshots(callback)
        self._said: str | None = None

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
        step, leaves, notes = self.snapshots.find_newest()
        if writer != process.index:
            return (
                f"The last complete step is {step}. Process {writer} saves it in {self._directory}."
            )
        self._prepare()
        steps = self._storage.list_steps()
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
        name = self._storage.prepare(step, f"survivor{own}")
        with write_as_first_process():
            start_part(self._storage, name, leaves, notes, Process(0, 1), own)()
        self._storage.publish(name, step, self._keep, own)

    def _point_to_last(self, reason: str) -> str:
        steps = self._storage.list_steps()
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
        survivor.snapshots.take()


def save_after(error: OtherProcessError) -> None:
    """Save the last complete step, and report it in the message of the error."""
    for survivor in list(_active):
        said = survivor.act(error)
        if said not in str(error):
            error.args = (f"{error}\n\n{said}",)
