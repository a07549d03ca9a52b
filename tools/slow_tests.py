"""`python -m tools.slow_tests LOG`: write `tests/slow_tests.txt` from a run of all tests.

LOG is what `pytest -n 3 --all --durations=0 --durations-min=0.05` printed. A test function is in
the list if one of its rows took longer than the limit. The short run leaves it out, and CI runs a
sample of them.

`python -m tools.slow_tests --later LOG LOG`: write `tests/later_tests.txt` from two short runs. The
short run leaves these functions out as well, and CI runs some rows of each. The machine is noisy,
so a function is in the list if it took long in both runs.
"""

import argparse
import collections
import pathlib
import re

LIMIT_S = 0.8
_TESTS = pathlib.Path(__file__).parents[1] / "tests"
FILE = _TESTS / "slow_tests.txt"
LATER = _TESTS / "later_tests.txt"
_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S+?)(\[.*)?\s*$")


def slow_functions(log: str) -> list[str]:
    """The test functions of which a row took longer than the limit, in order."""
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for line in log.splitlines():
        found = _LINE.match(line)
        if found:
            seconds[found[2], found[3] or ""] += float(found[1])
    return sorted({function for (function, _), spent in seconds.items() if spent > LIMIT_S})


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser("python -m tools.slow_tests", description=__doc__)
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="LOG")
    parser.add_argument("--later", action="store_true", help="write the list of short runs")
    given = parser.parse_args()
    functions = set.intersection(*(set(slow_functions(log.read_text())) for log in given.logs))
    if not functions:
        parser.error("the logs have no durations: run pytest with --durations=0")
    file = LATER if given.later else FILE
    if given.later:
        functions |= set(file.read_text().split())
    file.write_text("".join(f"{function}\n" for function in sorted(functions)))
    print(f"{len(functions)} functions in {file.name}")


if __name__ == "__main__":
    main()
