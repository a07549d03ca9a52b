"""Writes a Slurm batch script for the job of a command."""

import os
import shlex
import sys

from jaxdist._launching.files.request import Request

# How long Slurm waits after one task has ended. The others first save what they have, then end.
_WAIT_SECONDS = 300
FOREIGN = (
    "TF_CONFIG",
    "JAXDIST_SERVICE",
    "JAXDIST_LAUNCHER",
    "JAXDIST_DEVICES_PER_PROCESS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
)


def make_slurm_script(request: Request) -> str:
    """Return the script, for `sbatch`.

    Raises:
        LaunchError: An option has no use in Slurm.
    """
    refuse_foreign(request)
    options = [f"--job-name={request.job_name}", *list_options(request)]
    options += [f"--chdir={os.getcwd()}", f"--output={request.job_name}-%j.log"]
    variables = {"JAXDIST_CLUSTER": "slurm", **request.list_variables(os.environ)}
    step = ["srun", "--label", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    if request.cpus is not None:
        # srun does not inherit this option from sbatch.
        step.append(f"--cpus-per-task={request.cpus}")
    step += list_bindings(request)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        f"# {request.count} processes of one job. Start it with: sbatch FILE",
        "",
        "# Variables of the shell that called sbatch would be taken for those of the job.",
        f"unset {' '.join(FOREIGN)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "",
        f"for attempt in $(seq 1 {request.restarts + 1}); do",
        "    export JAXDIST_ATTEMPT=$attempt",
        f"    if {shlex.join([*step, sys.executable, *request.arguments])}; then",
        "        exit 0",
        "    else",
        "        code=$?",
        "    fi",
        '    echo "attempt $attempt ended with exit code $code" >&2',
        "done",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def refuse_foreign(request: Request) -> None:
    """Raise if an option was given that has no use in Slurm.

    Raises:
        LaunchError: Such an option was given.
    """
    request.refuse_options(
        "slurm",
        install="The job uses the Python of this command.\n\nLeave out --install.",
        image=(
            "Slurm runs programs of the machine itself, unless a plugin for containers is "
            "installed.\n\nLeave out --image; add the option of your plugin to `srun` in the file."
        ),
    )


def list_options(request: Request) -> list[str]:
    """Return the options of sbatch for the resources of the processes."""
    options = [f"--ntasks={request.count}"]
    if request.hosts is not None:
        options += [f"--nodes={request.hosts}", f"--ntasks-per-node={request.processes_of_host}"]
    if request.cpus is not None:
        options.append(f"--cpus-per-task={request.cpus}")
    if request.memory is not None:
        options.append(_describe_memory(request))
    if request.gpu is not None:
        kind = "" if request.gpu == "any" else f"{request.gpu}:"
        options.append(f"--gpus-per-task={kind}{request.devices_of_each}")
    if request.partition is not None:
        options.append(f"--partition={request.partition}")
    if request.time is not None:
        options.append(f"--time={request.time}")
    return options


def list_bindings(request: Request) -> list[str]:
    """Return the options of srun that give each process its own GPUs.

    Without them, Slurm 22.05 does so only if the job requests no kind of GPU.
    """
    if request.gpu in (None, "any"):
        return []
    return [f"--gpu-bind=per_task:{request.devices_of_each}"]


def _describe_memory(request: Request) -> str:
    """Return the memory of a host; without `hosts`, the memory for each core."""
    if request.hosts is not None:
        return f"--mem={(request.memory or 0) * request.processes_of_host}G"
    # In MiB, rounded up.
    return f"--mem-per-cpu={-(-(request.memory or 0) * 1024 // (request.cpus or 1))}M"
