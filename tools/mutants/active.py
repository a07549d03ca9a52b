"""Says inside of the woven package which mutant is on, and records which ones tests reach.

Copied next to the package under the name `weaving.RUNTIME`; it imports nothing of this project.
"""

import os
from collections.abc import Callable

# The number of the mutant that is on. Read once: it must not change while programs are cached.
_ON = int(os.environ.get("JAXDIST_MUTANT", "-1"))


def is_on(number: int) -> bool:
    """Return whether this process runs with this mutant."""
    return number == _ON


def _make_reach() -> Callable[[int], None]:
    file = os.environ.get("JAXDIST_MUTANTS_REACHED")
    if file is None:
        return lambda number: None
    # Tests replace functions of `os`, fork, and end processes: each line is one append at once, by
    # functions that are bound here.
    get, write = os.environ.get, os.write
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    seen: set[tuple[int, str]] = set()

    def note(number: int) -> None:
        # Not set while modules are imported and tests are collected.
        test = get("PYTEST_CURRENT_TEST", "")
        if (number, test) not in seen:
            seen.add((number, test))
            # The end is ` (call)`, or another phase.
            write(out, f"{number}\t{test.rpartition(' (')[0]}\n".encode())

    return note


# Called before the statement that the mutant changes.
reach = _make_reach()
