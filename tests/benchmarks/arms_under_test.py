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


def told_apart(rank: int, ports: list[int]) -> list[int]:
    """What this process of a group was told."""
    return [rank, len(set(ports))]


def slow_second(rank: int, ports: list[int]) -> Loop:
    """A loop in which the second process takes longer."""
    return sleeper(0.05 * rank)


def first_hangs_second_fails(rank: int, ports: list[int]) -> None:
    """One waits for the other, which fails."""
    if rank == 0:
        time.sleep(600)
    raise ValueError("planted fault")
