"""`jaxdist trace`: profiles a few steps of a job, and shows where their time goes."""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxdist import hlo, jobs
from jaxdist._called import called, refuse
from jaxdist._devices import chips
from jaxdist._explain import BATCH, DISPATCH, STEP, StepTimes, read_step_times
from jaxdist._validate import as_path
from jaxdist.cli._train import ask_for_cpu_devices
from jaxdist.data import batches
from jaxdist.errors import ArgumentError, BackendStartedError, UnsupportedError

# The first steps compile, and fill caches.
_WARM_UP = 3
_MOST_STEPS = 1000


@called("jaxdist trace")
def trace(arguments: argparse.Namespace) -> int:
    """Record a profile of a job's steps, and print where their time goes.

    Cost:
        One compilation, and the steps.
    """
    if not 1 <= arguments.steps <= _MOST_STEPS:
        raise ArgumentError(
            f"--steps {arguments.steps} was given.\n\n"
            f"--steps is a number from 1 to {_MOST_STEPS}.\n\nLeave it out for 5 steps."
        )
    folder = as_path("--directory", arguments.directory, "profile")
    arguments.directory = Path(folder)
    loaded = jobs.load_job_config(arguments.config, arguments.overrides)
    config = loaded.values
    if jobs.has_cluster(config) or config.strategy.kind == "parameter_server":
        raise refuse(
            f"{arguments.config}, whose job has several processes.",
            "It records the profile of one process.",
            'Trace the job with --set strategy.kind="auto", or record a process of it with '
            "jax.profiler.trace.",
            kind=UnsupportedError,
        )
    _choose_platforms()
    ask_for_cpu_devices(jobs.count_cpu_devices(config))
    times = record(jobs.load_job(arguments.config, arguments.overrides), arguments)
    console = Console(file=sys.stdout)
    if console.is_terminal:
        console.print(times)
    else:
        # In a file, rich would fold a table to 80 columns.
        console.print(str(times), markup=False, highlight=False, soft_wrap=True)
    return 0


def record(job: Any, arguments: argparse.Namespace) -> StepTimes:
    """Run the steps of a task under the profiler."""
    strategy = jobs.make_strategy(job.config)
    state = job.build(strategy)
    source = batches(
        job.data.train,
        job.config.data.batch_size,
        shuffle=True,
        seed=job.config.data.seed,
        drop_remainder=True,
        repeat=None,
    )
    step = type(job).train_step
    options = jax.profiler.ProfileOptions()
    # An event for each Python call would slow the step down, and hide what it waits for.
    options.python_tracer_level = 0
    with iter(strategy.experimental_distribute_dataset(source)) as data:
        batch = next(data)
        program = strategy.lower(step, (*state, batch), options=job.options)
        categories = hlo.categories(program.compile().as_text())
        for _ in range(_WARM_UP):
            jax.block_until_ready(strategy.run(step, (*state, next(data)), options=job.options))
        with jax.profiler.trace(
            arguments.directory, create_perfetto_trace=True, profiler_options=options
        ):
            for _ in range(arguments.steps):
                with jax.profiler.TraceAnnotation(STEP):
                    with jax.profiler.TraceAnnotation(BATCH):
                        batch = next(data)
                    with jax.profiler.TraceAnnotation(DISPATCH):
                        result = strategy.run(step, (*state, batch), options=job.options)
                    jax.block_until_ready(result)
    return read_step_times(arguments.directory, job.config.task, categories)


def _choose_platforms() -> None:
    """Keep JAX from loading libtpu if there is no TPU.

    Raises:
        BackendStartedError: libtpu is already loaded.
    """
    # Without a TPU, the profiler of libtpu ends the process with a signal.
    if chips.chips_of_this_machine():
        return
    if chips.has_loaded_libtpu():
        raise BackendStartedError(
            "jaxdist trace was called in a process that has loaded libtpu, on a machine without a "
            "TPU.\n\n"
            "The profiler of libtpu needs a TPU. JAX loads it with the first array, unless "
            "JAX_PLATFORMS leaves it out.\n\n"
            "Run the command in a process of its own: jaxdist trace CONFIG."
        )
    if getattr(jax.config, "jax_platforms", None) is None:
        found = "cuda,cpu" if Path("/dev/nvidia0").exists() else "cpu"
        jax.config.update("jax_platforms", found)
