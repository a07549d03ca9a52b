"""`jaxdist plan`: predicts memory and time of a job on TPUs or GPUs that this machine lacks."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from jaxdist import jobs, training
from jaxdist._gpus import is_gpu_name
from jaxdist._reports import SlicePlan, Sweep, can_redraw, picture_path
from jaxdist.errors import ArgumentError, JaxdistError

# How errors of the functions begin that the command calls with its flags.
_ARGUMENT = re.compile(
    r"^jobs\.(?:plan|sweep)_job was given (topology|logical|rules|global_batch|save)="
)


def plan(arguments: argparse.Namespace) -> int:
    """Plan a job, print the plan, and draw its device assignment.

    Cost:
        Compiles for seconds to minutes. Uses no device.
    """
    topology = _add_slice_count(arguments.topology, arguments.slices)
    # Check this before the plan, which takes minutes.
    if arguments.png is not None:
        training.require_extra("matplotlib", "draw an assignment (--png)")
        picture_path(arguments.png)
    if arguments.sweep and arguments.rules:
        raise ArgumentError(
            f"--rules {arguments.rules} was given with --sweep.\n\n--sweep tries all rules.\n\n"
            "Leave one of the two out."
        )
    if arguments.sweep and arguments.save:
        raise ArgumentError(
            f"--save {arguments.save} was given with --sweep.\n\nA file has one program, and "
            "--sweep compiles many.\n\nLeave one of the two out."
        )
    if getattr(jax.config, "jax_platforms", None) is None:
        # A plan only needs shapes. On a TPU VM, JAX would otherwise lock the TPU for this process.
        jax.config.update("jax_platforms", "cpu")
    overrides = [*arguments.overrides, *map(_read_option, arguments.xla)]
    job = jobs.load_job(arguments.config, overrides)
    console = Console(file=sys.stdout)
    found = _make_plan(job, topology, arguments)
    if console.is_terminal:
        console.print(found)
    else:
        # Print whole lines to a pipe, for which a console would use 80 columns.
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    best = found.best if isinstance(found, Sweep) else found
    if arguments.png is not None and best is not None:
        written = best.figure(arguments.png)
        console.print(f"Drawn: {written}", markup=False, highlight=False, soft_wrap=True)
    # The plan explains why nothing was saved.
    is_missing = arguments.save and isinstance(found, SlicePlan) and not found.memory.fits
    return 1 if is_missing else 0


def _make_plan(job: Any, topology: str, arguments: argparse.Namespace) -> SlicePlan | Sweep:
    with _show_progress() as report:
        given: dict[str, Any] = {
            "logical": arguments.logical,
            "global_batch": arguments.global_batch,
            "report": report,
        }
        try:
            if arguments.sweep:
                return jobs.sweep_job(job, topology, **given)
            given |= {"rules": arguments.rules, "quick": arguments.quick, "save": arguments.save}
            return jobs.plan_job(job, topology, **given)
        except JaxdistError as error:
            text = _ARGUMENT.sub(lambda m: f"--{m[1].replace('_', '-')} is ", str(error), 1)
            error.args = (text, *error.args[1:])
            raise


@contextlib.contextmanager
def _show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows the current work: a live line on a terminal, else plain lines."""
    # Use stderr, so that stdout has only the plan and can be redirected.
    console = Console(file=sys.stderr)
    if not can_redraw(console):
        yield lambda what: console.print(
            f"jaxdist plan: {what}", markup=False, highlight=False, soft_wrap=True
        )
        return
    # The time comes first, because a narrow screen cuts off the end of the line.
    last = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
        TextColumn("{task.description}", markup=False, table_column=last),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what: progress.update(task, description=what)


def _read_option(text: str) -> str:
    """Return the configuration override for an option of the compiler."""
    name, equals, value = text.strip().lstrip("-").partition("=")
    if not (name and equals and value):
        raise ArgumentError(
            f"--xla {text} was given.\n\nAn option of the compiler is written KEY=VALUE.\n\n"
            "Pass for instance --xla xla_tpu_scoped_vmem_limit_kib=65536."
        )
    return f"compiler.{name}={value}"


def _add_slice_count(name: str, slices: int | None) -> str:
    if slices is None:
        return name
    if slices < 1:
        raise ArgumentError(
            f"--slices {slices} was given.\n\n--slices is a number from 1 up.\n\n"
            "Leave it out for 1 slice."
        )
    if is_gpu_name(name):
        raise ArgumentError(
            f"--slices {slices} and --topology {name} were given.\n\nGPUs have no slices: the "
            "name has the number of hosts, or of NVLink domains.\n\nLeave --slices out, and pass "
            "for instance --topology h100:4x8 for 4 hosts."
        )
    if "*" in name:
        raise ArgumentError(
            f"--slices {slices} and --topology {name} were given.\n\n"
            "The number after * in --topology is the number of slices.\n\n"
            "Leave one of the two out."
        )
    return f"{name}*{slices}"
