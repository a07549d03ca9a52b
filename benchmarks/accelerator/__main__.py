"""`python -m benchmarks.accelerator`: times and checks on one GPU or TPU, in one table.

Nothing is installed. On a machine without an accelerator it says so and exits with 3;
`--platform cpu` runs the same rows on the CPU, to see that they run. Exit code 1: a check is not
met, with `--gate` a time as well.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks import _report
from benchmarks._lines import CountLine, Line

EXIT_NOT_MET = 1
EXIT_NO_ACCELERATOR = 3
_PLATFORMS = ("auto", "gpu", "tpu", "cpu")
# What JAX_PLATFORMS calls them.
_OF_JAX = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and give the exit code."""
    given = _parser().parse_args(arguments)
    if given.platform != "auto":
        os.environ["JAX_PLATFORMS"] = _OF_JAX[given.platform]
    # A small share of the memory, so that others on the device go on, and peaks are told.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    machine = _report.Machine()
    found, why = _platform()
    if found != given.platform and (given.platform != "auto" or found == "cpu"):
        print(_nothing(given.platform, found, why), file=sys.stderr)
        return EXIT_NO_ACCELERATOR
    lines = _measured(given)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(_heading(found), highlight=False, markup=False)
    _report.show(console, lines, machine)
    if given.json:
        _report.write_json(given.json, lines, machine)
    return exit_code(lines, gate=given.gate)


def exit_code(lines: Sequence[Line], *, gate: bool) -> int:
    """1 where a check is not met; with `gate` a time as well."""
    failed = [line for line in lines if line.met is False and (line.gates or gate)]
    return EXIT_NOT_MET if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--platform", choices=_PLATFORMS, default="auto", help="default: auto")
    parser.add_argument("--rows", metavar="ROW,...", help="which rows; all unless given")
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs")
    parser.add_argument("--gate", action="store_true", help="exit 1 for rows of time as well")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures")
    return parser


def _platform() -> tuple[str, str]:
    """The platform that JAX has chosen, and what it said where it has none."""
    import jax

    try:
        return jax.default_backend(), ""
    except RuntimeError as error:
        return "", str(error).splitlines()[0]


def _nothing(asked: str, found: str, why: str) -> str:
    what = "accelerator" if asked == "auto" else f"device of platform {asked}"
    said = f"JAX said: {why}" if why else f"JAX has {found} devices only."
    return (
        f"No {what} was found. {said}\n\n"
        "On one, install JAX for it: pip install 'jax[cuda13]' or pip install 'jax[tpu]'. "
        "--platform cpu runs the same rows here, to see that they run."
    )


def _measured(given: argparse.Namespace) -> list[Line]:
    from benchmarks.accelerator._rows import ROWS

    wanted = given.rows.split(",") if given.rows else list(ROWS)
    unknown = [name for name in wanted if name not in ROWS]
    if unknown:
        _parser().error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    progress = Console(stderr=True, highlight=False)
    lines: list[Line] = []
    for name in wanted:
        progress.print(f"row {name}", style="dim", markup=False)
        lines.extend(_row(name, ROWS[name], given.smoke))
    return lines


def _row(name: str, run: Callable[[bool], list[Line]], is_smoke: bool) -> list[Line]:
    """The lines of a row; one that fails is a check that is not met, and the others go on."""
    try:
        return run(is_smoke)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        return [CountLine(name, "", "", "", f"{type(error).__name__}: {said[:80]}", "it runs")]


def _heading(platform: str) -> str:
    import jax

    device = jax.devices()[0]
    what = f"{device.device_kind} ({platform}), one of {len(jax.devices())}"
    if platform == "cpu":
        return f"DRY RUN on {what}: nothing here is a figure of an accelerator"
    return f"On {what}"


if __name__ == "__main__":
    sys.exit(main())
