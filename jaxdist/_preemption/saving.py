"""Saves and restores the state of a handler."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxdist._buckets import as_place
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._checkpoints import Checkpoints, Restored, find_plain_leaves, to_plain
from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError, CheckpointError

_LOG = logging.getLogger("jaxdist")
_ARGUMENT = "checkpoint_or_checkpoint_manager"
# The key in the notes of a checkpoint for the number of runs before it.
_RUNS = "preemption_runs"
_MOST_SHOWN = 3


class Saving:
    """A state and its checkpoints.

    Args:
        caller: The class that saves, for errors.
        given: The argument `checkpoint_or_checkpoint_manager`.
        directory: The argument `checkpoint_dir`.

    Raises:
        ArgumentError: No directory, two directories, or arrays that change with each step.
        ArgumentTypeError: Checkpoints without a state, or a function that does not return a step
            and a state.
    """

    def __init__(self, given: Any, directory: Any) -> None:
        self._caller = name_call()
        if isinstance(given, Checkpoints):
            raise refuse_type(
                f"{_ARGUMENT}={show(given)}.",
                "training.Checkpoints does not hold the state that it saves.",
                f"Pass both: {_ARGUMENT}=(checkpoints, state).",
            )
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Checkpoints):
            if directory is not None:
                raise refuse(
                    f"checkpoint_dir={show(directory)} and checkpoints of {given[0].directory}.",
                    "The checkpoints have a directory already.",
                    "Leave checkpoint_dir out.",
                )
            self.checkpoints, state = given
            self._is_own = False
        else:
            if directory is None:
                raise refuse(
                    "a state and checkpoint_dir=None.",
                    "A state needs a directory for its checkpoints.",
                    "Pass for instance checkpoint_dir='runs/job', or (checkpoints, state).",
                )
            directory = as_place("checkpoint_dir", directory, "runs/job")
            self.checkpoints, state = Checkpoints(directory, keep=1), given
            self._is_own = True
        self._read: Callable[[], Any] | None = None
        self._state: Any = None
        if _is_function(state):
            self._read = state
            self.get_state(0)
        else:
            self._state = state
            _check_can_be_written(state)

    def get_state(self, runs: int) -> tuple[int, Any]:
        """Return the step of the next checkpoint, and the state."""
        if self._read is None:
            return runs, self._state
        found = self._read()
        is_pair = isinstance(found, tuple) and len(found) == 2
        if not is_pair or isinstance(found[0], bool) or not isinstance(found[0], int):
            raise ArgumentTypeError(
                f"{self._caller}: {_ARGUMENT} is a function that returned {show(found)}.\n\n"
                "It returns the number of completed steps and the state.\n\n"
                "Pass for instance lambda: (step, (model, optimizer))."
            )
        return found

    def restore(self) -> tuple[Restored | None, int]:
        """Read the newest checkpoint; return it and the number of runs before it."""
        restored = self.checkpoints.restore(self.get_state(0)[1])
        if restored is None:
            return None, 0
        return restored, int(restored.notes.get(_RUNS, restored.step))

    def check_first_step(self, restored: Restored | None) -> None:
        """Check before the first run that the user's function continues from the restored step.

        Otherwise the checkpoint could not be written after a notice.

        Raises:
            CheckpointError: The function returns a step below that of the checkpoint.
        """
        if self._read is None or restored is None:
            return
        step = self.get_state(0)[0]
        if step < restored.step:
            raise CheckpointError(
                f"{self._caller}: {_ARGUMENT} is a function that returned step {step} before the "
                f"first run, and the checkpoint that was restored is of step {restored.step}.\n\n"
                "The steps of checkpoints only grow: restore takes the highest one.\n\n"
                "Take step and state from handler.restored, or choose another directory. To train "
                f"again from step {step}, call discard_after({step}) of training.Checkpoints "
                "before you make the handler."
            )

    def save(self, runs: int, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, and wait until it is complete.

        If the user has written a checkpoint of this step, it has the same state, and is kept.

        Raises:
            CheckpointError: The user's function returned a step below the newest checkpoint.
        """
        step, state = self.get_state(runs)
        steps = self.checkpoints.steps()
        newest = steps[-1] if steps else -1
        if step == newest:
            _LOG.info("The checkpoint of step %d exists already.", step)
            return
        if self._read is None and step < newest:
            # The user's own calls of `save` count something other than runs. The number of runs is
            # in the notes.
            step = newest + 1
        self.checkpoints.save(step, state, {**(notes or {}), _RUNS: runs})
        self.checkpoints.wait_until_finished()

    def close(self) -> None:
        """Release the directory, unless the checkpoints belong to the user."""
        if self._is_own:
            self.checkpoints.close()


def _is_function(state: Any) -> bool:
    # Models are callable too, so `callable` cannot tell them apart.
    return inspect.isroutine(state) or isinstance(state, functools.partial)


def _check_can_be_written(state: Any) -> None:
    plain = find_plain_leaves(state)
    if plain:
        shown = ", ".join(f"state{path}" for path in plain[:_MOST_SHOWN])
        more = f" and {len(plain) - _MOST_SHOWN} more" if len(plain) > _MOST_SHOWN else ""
        raise refuse(
            f"in {_ARGUMENT} a state with {len(plain)} arrays or other values outside of NNX "
            f"objects and variables: {shown}{more}.",
            "Each step makes new arrays. The handler would save those that it was given.",
            "Pass a function that returns the present step and state, and take what was restored "
            "from handler.restored: lambda: (step, state).",
        )
    if not jax.tree.leaves(to_plain(state)):
        raise refuse(
            f"{_ARGUMENT}={show(state)}, which has no arrays.",
            "It is the state that a restart needs.",
            "Pass for instance (model, optimizer), or a function that returns the number of "
            "completed steps and the state.",
        )
