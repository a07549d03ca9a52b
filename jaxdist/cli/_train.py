"""`jaxdist train`: trains the job of a configuration."""

import argparse
import sys

import jax
from rich.console import Console

from jaxdist import jobs
from jaxdist._buckets import Place, as_place, shorten_place
from jaxdist._devices import runtime
from jaxdist._reports import print_line
from jaxdist.cli._server import make_server_arguments, run_server
from jaxdist.errors import BackendStartedError
from jaxdist.jobs import TrainingReport


def train(arguments: argparse.Namespace) -> int:
    """Train a job and print the result. Return 0, or 130 after Ctrl-C."""
    loaded = jobs.load_job_config(arguments.config, arguments.overrides)
    config = loaded.values
    if jobs.is_server_task(config):
        return run_server(make_server_arguments())
    # In a job of several processes, only one prints.
    console = Console(file=sys.stdout, quiet=not jobs.is_chief(config))
    # Check this before JAX starts: a finished run needs no device.
    finished = jobs.finished_run(loaded, accept_changes=arguments.accept_changes)
    if finished is not None:
        print_line(console, jobs.finished_line(finished, loaded))
        print_line(console, format_final_line(finished))
        return 0
    if not jobs.has_cluster(config):
        ask_for_cpu_devices(jobs.count_cpu_devices(config))
    report = jobs.train(
        loaded,
        jobs.make_strategy(config),
        console=console,
        skip_damaged=arguments.resume_from_previous,
        accept_changes=arguments.accept_changes,
    )
    if report.was_interrupted:
        folder = as_place("directory", config.checkpoint.directory, "runs/job")
        print(f"jaxdist train: {format_interrupted_line(report, folder)}", file=sys.stderr)
        return 130
    print_line(console, format_final_line(report))
    return 0


def format_final_line(report: TrainingReport) -> str:
    """Return a line with the result, steps, replicas and throughput."""
    speed = "n/a" if report.units_per_s is None else f"{report.units_per_s:,.0f}"
    return (
        f"{report.headline}  steps {report.steps}  "
        f"replicas {report.num_replicas}  {report.unit}/s {speed}"
    )


def format_interrupted_line(report: TrainingReport, folder: Place) -> str:
    """Return where training stopped, and where the next run starts."""
    stopped = f"stopped by Ctrl-C after step {report.steps}; no partial checkpoint was written. "
    if report.next_step == report.steps:
        stopped = f"stopped by Ctrl-C after step {report.steps}, which was saved. "
    if report.next_step is None:
        return stopped + "There is no checkpoint yet: the next run starts from the beginning."
    checkpoint = shorten_place(folder / str(report.next_step))
    return f"{stopped}The next run resumes from step {report.next_step}: {checkpoint}"


def ask_for_cpu_devices(count: int) -> None:
    """Request `count` CPU devices. They are used only if the machine has no accelerator."""
    try:
        runtime.virtual_devices(count)
    except BackendStartedError:
        # JAX has started already, so the number of CPU devices is fixed, but it may be enough.
        if jax.default_backend() == "cpu" and len(jax.local_devices()) < count:
            raise
