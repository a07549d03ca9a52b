"""Errors for checkpoints that cannot be written or restored."""

from collections.abc import Sequence

from jaxdist._buckets import BucketPath, Place
from jaxdist._called import refuse
from jaxdist._validate import format_lines
from jaxdist.errors import BucketError, CheckpointError, DamagedCheckpointError

DAMAGED = "damaged"  # the folder of damaged checkpoints
_MOST_SHOWN = 5


class UnreadableError(ValueError):
    """A checkpoint differs from what was written, or Orbax could not read it."""


class ElsewhereError(RuntimeError):
    """Another process of the job could not write its part; the message names it."""


def make_directory_error(directory: Place, error: Exception) -> CheckpointError:
    """Return the error for a directory that Orbax cannot use."""
    return CheckpointError(
        f"The checkpoint directory {str(directory)!r} cannot be used: "
        f"{type(error).__name__}: {error}.\n\n"
        "It must be a directory that you may read and write, or one that can be created.\n\n"
        "Change its permissions, or choose another directory."
    )


def make_write_error(
    directory: Place, step: int, others: Sequence[int], error: Exception
) -> CheckpointError:
    """Return the error for a checkpoint that was not completed; `others` are complete steps."""
    remedy = "Free space on the disk or choose another directory, and run again."
    if isinstance(error, BucketError):
        # The last paragraph says what to do.
        text, _, remedy = str(error).rpartition("\n\n")
        error = OSError(text.partition("\n\n")[0].removesuffix("."))
    left = f"The last complete one is of step {others[-1]}." if others else "There is none yet."
    name = "" if isinstance(error, (ElsewhereError, BucketError)) else f"{type(error).__name__}: "
    return CheckpointError(
        f"Checkpoint {step} cannot be written to {directory}: {name}{error}.\n\n"
        f"A checkpoint counts when all of its files are written. {left}\n\n"
        f"{remedy}"
    )


def make_step_error(
    noun: str, step: int, directory: Place, steps: Sequence[int], resume: str
) -> CheckpointError:
    """Return the error for a step that is not above the steps of the checkpoints.

    Args:
        noun: The unit that the user counts: "step" or "epoch".
        step: The number of the step or epoch.
        directory: The directory of the checkpoints.
        steps: The steps of the complete checkpoints, oldest first.
        resume: How to continue from the newest checkpoint, as the first words of a sentence.
    """
    newest = steps[-1]
    has_it = f", and {directory / str(step)} exists" if step in steps else ""
    later = [s for s in steps if s >= step]
    return refuse(
        f"{noun}={step}{has_it}. The newest checkpoint in {directory} is of {noun} {newest}.",
        f"restore takes the checkpoint of the highest {noun}, and keep deletes the lowest ones, "
        "so each checkpoint is above those before it.",
        f"{resume}, save from {noun} {newest + 1} on, or choose another directory. To go back, "
        f"call discard_after({step - 1}) of training.Checkpoints before: it deletes "
        f"{describe_steps(later)}.",
        kind=CheckpointError,
    )


def describe_steps(steps: Sequence[int]) -> str:
    """Return the numbers of one or more checkpoints in words."""
    if len(steps) == 1:
        return f"checkpoint {steps[0]}"
    if len(steps) > _MOST_SHOWN:
        return f"the {len(steps)} checkpoints from {steps[0]} to {steps[-1]}"
    return f"the checkpoints {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def make_missing_error(directory: Place, step: int, steps: Sequence[int]) -> CheckpointError:
    """Return the error for a step without a checkpoint."""
    there = f"There are {list(steps)}." if steps else "There is none yet."
    return CheckpointError(
        f"Checkpoint {step!r} is not in {directory}.\n\n{there}\n\n"
        "Pass the step of an existing one; restore(state) without it takes the newest."
    )


def make_damage_error(
    directory: Place, step: int, before: Sequence[int], problems: list[str]
) -> DamagedCheckpointError:
    """Return the error for files that differ from what was written; `before` are earlier steps."""
    if before:
        remedy = (
            f"Resume from the one before, step {before[-1]}: `jaxdist train` does so with "
            "--resume-from-previous, restore_latest with skip_damaged=True. The damaged one "
            f"is moved to {directory / DAMAGED}."
        )
    else:
        away = f"move {directory / str(step)} away"
        if isinstance(directory, BucketPath):
            # Its folder has another name, and counts as long as the list of checkpoints has it.
            away = f"delete it by discard_after({step - 1}) of training.Checkpoints('{directory}'),"
        remedy = (
            f"No earlier one exists. Copy it back from elsewhere, or {away} to start from the "
            "beginning."
        )
    return DamagedCheckpointError(
        f"Checkpoint {step} in {directory} is damaged:\n{format_lines(problems)}\n\n"
        f"A checkpoint is restored only if its files are as they were written.\n\n{remedy}"
    )


def make_mismatch_error(
    directory: Place, step: int, problems: list[str], stacks: str | None = None
) -> CheckpointError:
    """Return the error for saved leaves that differ from the requested ones.

    Args:
        directory: The directory of the checkpoints.
        step: The step of this one.
        problems: A line for each leaf.
        stacks: A pattern of the leaves, if all of them may be stacks of layers in other chunks.
    """
    if stacks is not None:
        return CheckpointError(
            f"Checkpoint {step} in {directory} has {len(problems)} leaves of other shapes.\n"
            f"{format_lines(problems)}\n\n"
            "They have the shapes of stacked layers in another number of chunks, [layers, ...] or "
            "[chunks, layers / chunks, ...]; equal numbers of elements alone do not show that they "
            f"are these.\n\nIf they are, pass stacks={stacks!r}. Otherwise use the configuration "
            "that it was made with, or another checkpoint directory."
        )
    return CheckpointError(
        f"Checkpoint {step} in {directory} is of another model or optimizer: "
        f"{len(problems)} of its leaves differ.\n{format_lines(problems)}\n\n"
        "The saved leaves have the names, shapes and dtypes of the state that is restored.\n\n"
        "Use the configuration that it was made with, or another checkpoint directory."
    )
