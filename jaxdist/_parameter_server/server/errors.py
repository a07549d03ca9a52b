"""Errors that several calls of a server raise."""

from collections.abc import Sequence

from jaxdist._validate import format_lines
from jaxdist.errors import ArgumentError, DeadlineExceededError, UnavailableError


def make_wait_error(
    caller: str, closure: int | None, seconds: float, s: int, holders: Sequence[str]
) -> DeadlineExceededError:
    """Return the error for a read or change that waited until its deadline."""
    who = "a change outside of a function" if closure is None else f"function {closure}"
    held = format_lines(list(holders)) or "Reads that came before."
    return DeadlineExceededError(
        f"{caller}: {who} waited {seconds:g} s for other functions:\n{held}\n\n"
        f"With max_staleness={s}, at most {s + 1} functions have read a variable and not yet "
        "changed it, and the oldest changes it first.\n\n"
        "Wait longer, let those functions finish or release them, or make max_staleness larger."
    )


def make_stale_error(name: str, staleness: int, s: int) -> ArgumentError:
    """Return the error for a change that would be too stale."""
    return ArgumentError(
        f"change of {name!r}: {staleness} changes were applied since the read that it was computed "
        f"from.\n\nmax_staleness={s} allows {s}. The closure is not registered here, because its "
        "deadline was over, it was released, or the server was started again.\n\n"
        "Read again, with closure=, and compute the change from the new values."
    )


def make_broken_error(why: str) -> UnavailableError:
    """Return the error for a server whose values were lost in the middle of an update."""
    return UnavailableError(
        f"This server lost values in an update program: {why}.\n\n"
        "A program takes the memory of the old values, so they cannot be restored when it "
        "fails.\n\n"
        "Start the server again: it serves from its newest snapshot. Too little memory is the "
        "usual cause: put fewer variables on each server."
    )
