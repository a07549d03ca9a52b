"""The jobs of the docs on Slurm and Ray, with three nodes each: `make test-hosts`.

It runs `tests/hosts/clusters` and writes what happened into `docs/machines/several-hosts.md`.
"""

import datetime
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "machines" / "several-hosts.md"
BEGIN, END = "<!-- table: make test-hosts -->", "<!-- end of the table -->"
_TESTS = "tests/hosts/clusters"
_PREFIX = "test_"


def main() -> None:
    """Run the tests and write the table; exit as pytest does, or with 1 if a test was skipped."""
    with tempfile.TemporaryDirectory(prefix="jaxdist-hosts-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "--all", f"--junitxml={report}", _TESTS]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    if skipped or not cases:
        sys.exit(f"{len(skipped)} tests were skipped, of {len(cases)}: nothing is recorded")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, *make_table(cases), END + after]))
    sys.exit(code)


def make_table(cases: list[ElementTree.Element]) -> list[str]:
    """Return the lines of the table: one for each test that ran."""
    lines = [f"{_describe_run()}:", "", "| cluster | job | outcome | time |", "|---|---|---|---|"]
    for case in cases:
        cluster = (case.get("classname") or "").rpartition(".")[2].removeprefix(_PREFIX)
        test, _, kind = (case.get("name") or "").removeprefix(_PREFIX).partition("[")
        job = test.replace("_", " ") + (f": {kind.removesuffix(']')}" if kind else "")
        has_failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "**failed**" if has_failed else "passed"
        cells = (cluster.capitalize(), job, outcome, f"{float(case.get('time') or 0):.0f} s")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _describe_run() -> str:
    commit = _read("git", "rev-parse", "--short", "HEAD")
    versions = {
        "Python": platform.python_version(),
        "JAX": importlib.metadata.version("jax"),
        "Slurm": _read("dpkg-query", "--show", "--showformat=${Version}", "slurmd"),
        "Ray": importlib.metadata.version("ray"),
    }
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{datetime.date.today().isoformat()}, commit {commit}, {words}"


def _read(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
