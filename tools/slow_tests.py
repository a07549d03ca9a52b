"""`python -m tools.slow_tests LOG`: write `tests/slow_tests.txt` from a run of all tests.

LOG is what `pytest -n 3 --all --durations=0 --durations-min=0.05` printed. A test function is in
the list if one of its rows took longer than the limit; the short run leaves it out.
"""

import collections
import pathlib
import re
import sys

LIMIT_S = 0.8
FILE = pathlib.Path(__file__).parents[1] / "tests" / "slow_tests.txt"
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
    if len(sys.argv) != 2:
        sys.exit("python -m tools.slow_tests LOG: name the file of what pytest printed")
    functions = slow_functions(pathlib.Path(sys.argv[1]).read_text())
    if not functions:
        sys.exit(f"{sys.argv[1]} has no durations: run pytest with --durations=0")
    FILE.write_text("".join(f"{function}\n" for function in functions))
    print(f"{len(functions)} functions in {FILE.name}")


if __name__ == "__main__":
    main()
