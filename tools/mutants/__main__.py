"""`python -m tools.mutants`: run the mutants, or a part of them; count and compare the results."""

import argparse
import pathlib
import signal
import subprocess
import sys
import time

from tools.mutants import comparison, record, sandbox
from tools.mutants.project import RECORD, Project
from tools.mutants.reach import find_reach
from tools.mutants.running import Record, run_part

ROOT = pathlib.Path(__file__).parents[2]


def main(arguments: list[str] | None = None, project: Project | None = None) -> int:
    """Run what is open, print the results, and return 1 if tests find less than before."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--part", metavar="K/N", default="1/1", help="run part K of N")
    parser.add_argument("--against", metavar="FILE", help="an earlier record, or its commit")
    parser.add_argument("--processes", metavar="N", type=int, default=2, help="of the first run")
    options = parser.parse_args(arguments)
    project = project or Project(ROOT)
    before = None if options.against is None else read_earlier(project, options.against)
    if not sandbox.is_available():
        sys.exit(
            "Mutants run in namespaces of Linux (`unshare`), which this machine does not allow."
        )
    kept = Record(project)
    todo = len(kept.list_open(options.part))
    print(f"code {project.code} at {project.commit}: {todo} mutants to run", flush=True)
    if todo:
        reach = find_reach(project, options.processes)
        if reach.failed:
            print(f"not used, since they fail without a mutant: {', '.join(reach.failed)}")
        start = time.monotonic()
        for mutant, verdict in run_part(kept, reach, options.part):
            clock = round(time.monotonic() - start)
            where = f"{mutant.file}: {mutant.function}"
            print(f"{clock:5} s  {verdict.result:9}  {where}  {verdict.test}", flush=True)
    rows = kept.read()
    print(comparison.make_summary(project.mutants, rows))
    if before is None:
        return 0
    result = comparison.compare(project.mutants, before, rows)
    print(result.write())
    return 0 if result.is_good else 1


def read_earlier(project: Project, name: str) -> list[record.Row]:
    """Read a record from a file, or from a commit."""
    file = pathlib.Path(name)
    if file.is_file():
        return record.load(file)
    command = ["git", "show", f"{name}:{RECORD}"]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} is neither a file nor a commit with {RECORD}: {done.stderr.strip()}")
    return record.read_rows(done.stdout)


if __name__ == "__main__":
    # So that folders of a run that is ended are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
