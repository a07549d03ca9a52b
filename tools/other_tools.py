"""Runs the programs of the docs that use other tools: `make test-tools`, for one `TOOL=torch`.

Each tool has an environment of its own below `build/tools`, with this checkout and the newest
versions that pip finds. What is run there: the blocks of the pages with the title of the tool
(```` ```py title="torch" ````), and `tests/tools/test_TOOL.py`, if there is one. A tool that fails
does not keep the others from running. An environment that is there already is used again.

Where nothing is changed that is not committed, a line in `tests/records/tools.tsv` has the versions
and the outcome. `tests/documentation/test_other_tools.py` fails where a program was changed after
its line.

PyTorch's packages for GPUs need some gigabytes. `TORCH_INDEX=URL make test-tools` takes torch from
another index, such as that of its packages for CPUs.
"""

import dataclasses
import datetime
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

from tools.parts import find_code

ROOT = pathlib.Path(__file__).parents[1]
RECORDS = "tests/records/tools.tsv"
COLUMNS = (
    "tool",
    "packages",
    "python",
    "jax",
    "passed",
    "failed",
    "programs",
    "commit",
    "date",
)

# What pip installs for each tool; the first package is the one whose name the record has.
TOOLS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "pandas": ("pandas",),
    "datasets": ("datasets", "grain"),
    "tensorflow": ("tensorflow-cpu", "tensorflow-datasets"),
    "grain": ("grain",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboardX", "tensorboard"),
    "equinox": ("equinox",),
    "optuna": ("optuna",),
    "transformers": ("torch", "transformers", "safetensors"),
}
# What conftest.py and pytest's configuration need.
_TESTS = ("pytest", "pytest-timeout", "hypothesis")
_BLOCK = re.compile(r'^```py title="(\w+)"\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?', re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Program:
    """A block of a page, which is a whole program.

    Attributes:
        page: The page, from the root of the checkout.
        line: The line of its first line, from 1.
        text: The program.
        output: What it prints, as the page says; None where the page says nothing.
    """

    page: str
    line: int
    text: str
    output: str | None


def find_programs(tool: str) -> list[Program]:
    """Return the programs of the pages that use a tool."""
    return [program for name, program in _read_pages() if name == tool]


def name_tools_of_pages() -> set[str]:
    """Return all titles of blocks that are programs."""
    return {name for name, _ in _read_pages()}


def _read_pages() -> Iterator[tuple[str, Program]]:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start(2)) + 1
            yield found[1], Program(str(page.relative_to(ROOT)), line, found[2], found[3])


def has_tests(tool: str) -> bool:
    """Return whether a page or a test uses the tool."""
    return bool(find_programs(tool)) or _test_file(tool).exists()


def _test_file(tool: str) -> pathlib.Path:
    return ROOT / "tests" / "tools" / f"test_{tool}.py"


def digest_programs(tool: str) -> str:
    """Return a digest of the programs of a tool, of what they print, and of its own tests."""
    parts = [f"{program.text}\0{program.output}" for program in find_programs(tool)]
    if _test_file(tool).exists():
        parts.append(_test_file(tool).read_text())
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:16]


def read_records(text: str) -> dict[str, dict[str, str]]:
    """Return the lines of `tests/records/tools.tsv` by their tool."""
    head, *lines = text.splitlines() or [""]
    if head.split("\t") != list(COLUMNS):
        raise ValueError(f"The first line is {head!r}, and names other columns than {COLUMNS}.")
    rows = [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]
    return {row["tool"]: row for row in rows}


def add_record(text: str, record: Mapping[str, object]) -> str:
    """Add the line of a tool, or replace it; the lines are in the order of `TOOLS`."""
    rows = read_records(text) if text else {}
    rows[str(record["tool"])] = {name: str(record[name]) for name in COLUMNS}
    order = [tool for tool in TOOLS if tool in rows]
    lines = [COLUMNS, *([rows[tool][name] for name in COLUMNS] for tool in order)]
    return "".join("\t".join(line) + "\n" for line in lines)


def count_outcomes(report: str) -> tuple[int, int]:
    """Return how many tests of pytest's report in XML passed and failed; skipped ones failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = sum(1 for case in cases if any(child.tag != "properties" for child in case))
    return len(cases) - failed, failed


def _run(tool: str) -> tuple[int, int, list[str]]:
    """Make the environment, run the tests, and return their outcomes and all versions."""
    folder = ROOT / "build" / "tools" / tool
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    index = os.environ.get("TORCH_INDEX")
    if index and "torch" in TOOLS[tool]:
        _install(python, ["torch", "--index-url", index])
    _install(python, ["-e", str(ROOT), *_TESTS, *TOOLS[tool]])
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "JAXDIST_TOOL": tool, "JAX_PLATFORMS": "cpu"}
    for name in "PYTHONDONTWRITEBYTECODE", "PYTHONPATH":
        environment.pop(name, None)
    command = ["-m", "pytest", "tests/tools", f"--junitxml={report}", "-p", "no:cacheprovider"]
    subprocess.run([str(python), *command], cwd=ROOT, env=environment)
    passed, failed = count_outcomes(report.read_text()) if report.exists() else (0, 1)
    wanted = ["jax", *TOOLS[tool]]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    shown = subprocess.run(
        [str(python), "-c", code, *wanted], check=True, capture_output=True, text=True
    )
    return passed, failed, shown.stdout.split()


def _install(python: pathlib.Path, what: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *what]
    subprocess.run(command, check=True)


def main(names: Sequence[str]) -> int:
    """Run the named tools, or all; return 1 if one failed."""
    unknown = sorted(set(names) - set(TOOLS))
    if unknown:
        print(f"There is no tool {', '.join(unknown)}. The tools are {', '.join(TOOLS)}.")
        return 2
    summary: list[str] = []
    is_green = True
    for tool in names or TOOLS:
        if not has_tests(tool):
            summary.append(f"{tool}: no page and no test uses it")
            continue
        print(f"\n== {tool}", flush=True)
        began = time.monotonic()
        commit, changes = find_code(ROOT)
        try:
            passed, failed, versions = _run(tool)
        except subprocess.CalledProcessError as error:
            # pip has printed why.
            summary.append(f"{tool}: {' '.join(map(str, error.cmd[:5]))} ... failed")
            is_green = False
            continue
        is_green &= failed == 0 and passed > 0
        packages = " ".join(map(" ".join, zip(TOOLS[tool], versions[1:], strict=True)))
        took = f"{time.monotonic() - began:.0f} s"
        summary.append(f"{tool}: {passed} passed, {failed} failed ({packages}), {took}")
        if changes:
            summary[-1] += "; not recorded, since changes are not committed"
            continue
        record = {
            "tool": tool,
            "packages": packages,
            "python": platform.python_version(),
            "jax": versions[0],
            "passed": passed,
            "failed": failed,
            "programs": digest_programs(tool),
            "commit": commit,
            "date": datetime.date.today().isoformat(),
        }
        file = ROOT / RECORDS
        file.write_text(add_record(file.read_text() if file.exists() else "", record))
    print("\n" + "\n".join(summary))
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
