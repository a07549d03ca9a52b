"""`python -m benchmarks`: measure, print one line per claim, and say which are not met."""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks import _report
from benchmarks._bench import Bench, Options
from benchmarks._lines import CountLine, Line
from benchmarks._process import ArmError
from benchmarks._rows import ROWS, TABLES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", help=f"which rows, of {','.join(ROWS)}; all unless given")
    parser.add_argument(
        "--table",
        choices=list(TABLES),
        help="instead of rows: every algorithm's collectives, compiled, against its formula",
    )
    parser.add_argument("--full", action="store_true", help="longer bursts, more rounds and sizes")
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs")
    parser.add_argument("--gate", action="store_true", help="exit 1 for rows of time as well")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--tensorflow",
        metavar="PYTHON",
        default=os.environ.get("JAXDIST_BENCH_TENSORFLOW"),
        help="interpreter of an environment that has TensorFlow; without one its rows are left out",
    )
    return parser


def measure(rows: Sequence[str], options: Options) -> list[Line]:
    """The lines of these rows; a row that fails is a count that is not met."""
    lines: list[Line] = []
    with Bench(options) as bench:
        for row in rows:
            with bench.row(row):
                try:
                    lines.extend({**ROWS, **TABLES}[row].run(bench))
                except ArmError as error:
                    options.report(str(error))
                    first = str(error).splitlines()[0]
                    lines.append(CountLine(row, "", "", "", f"failed: {first}", "runs"))
                    bench.close()
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and give the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    rows = given.rows.split(",") if given.rows else list(ROWS)
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if given.table:
        rows = [given.table]
    progress = Console(stderr=True, highlight=False)
    machine = _report.Machine()
    options = Options(
        is_full=given.full,
        is_smoke=given.smoke,
        tensorflow=given.tensorflow,
        report=lambda text: progress.print(text, style="dim", markup=False),
    )
    lines = measure(rows, options)
    # A table does not fit into the 80 columns that a pipe is taken to have.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    _report.show(console, lines, machine)
    if given.json:
        _report.write_json(given.json, lines, machine)
    gates_on_time = given.gate and not machine.is_loaded
    failed = [line for line in lines if line.met is False and (line.gates or gates_on_time)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
