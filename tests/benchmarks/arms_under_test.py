"""Arms that do what a test needs."""

import os
import sys
import time

from benchmarks._loop import Loop


def double(value: int) -> int:
    """Twice the value."""
    return 2 * value


def chatty() -> str:
    """Prints, from Python and from below."""
    print("noise")
    os.write(1, b"more noise\n")
    return "answer"


def fails() -> None:
    """Raises."""
    raise ValueError("planted fault")


def dies() -> None:
    """Takes its process down."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


def hangs() -> None:
    """Does not come back."""
    time.sleep(600)


def sleeper(seconds: float) -> Loop:
    """A loop that sleeps."""
    ran = []

    def run(steps: int) -> None:
        ran.append(steps)
        time.sleep(seconds * steps)

    return Loop(run, facts=lambda: {"steps": sum(ran)})
