"""Writes a SkyPilot task for the job of a command."""

import json
import os
import pathlib
import shlex
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.files.request import Request, TaskRequest, write_yaml
from jaxdist.errors import LaunchError

_PORT = 8470
_CALLER = "jaxdist launch --print skypilot"


@called(_CALLER)
def make_skypilot_task(request: Request) -> str:
    """Return the task, for `sky launch`.

    The processes are divided among `hosts` machines, or run on one.

    Raises:
        LaunchError: An option has no use in SkyPilot, or the file is outside the folder that
            SkyPilot copies.
    """
    request.refuse_options(
        "skypilot",
        partition="Partitions belong to Slurm.\n\nLeave out --partition.",
        time=(
            "SkyPilot has no time limit for a task.\n\nLeave out --time; `sky launch --down "
            "--idle-minutes-to-autostop 5` gives the machines back."
        ),
    )
    if request.gpu == "any":
        raise refuse(
            "--gpu any.",
            "SkyPilot chooses machines by the kind of their GPUs.",
            "Pass a kind that `sky show-gpus` lists, for instance --gpu H100.",
            kind=LaunchError,
        )
    hosts, each = request.hosts or 1, request.processes_of_host
    resources: dict[str, Any] = {}
    if request.cpus is not None:
        resources["cpus"] = f"{request.cpus * each}+"
    if request.memory is not None:
        resources["memory"] = f"{request.memory * each}+"
    if request.gpu is not None:
        resources["accelerators"] = f"{request.gpu}:{request.devices_of_each * each}"
    if request.image is not None:
        resources["image_id"] = f"docker:{request.image}"
    if request.restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": request.restarts}
    task: dict[str, Any] = {
        "name": request.job_name,
        "num_nodes": hosts,
        # SkyPilot copies this folder to each machine.
        "workdir": ".",
        "envs": request.list_variables(os.environ),
    }
    if resources:
        task["resources"] = resources
    if request.image is None:
        task["setup"] = shlex.join(["pip", "install", *request.requirements]) + "\n"
    task["run"] = _write_run(request, _make_arguments(request))
    command = "sky jobs launch" if request.restarts else "sky launch"
    start = (
        f"# {request.count} processes of one job. Start it with: {command} FILE,\n"
        f"# in the folder {os.getcwd()}\n"
    )
    return start + write_yaml(task)


def _make_arguments(request: Request) -> list[str]:
    """Return the arguments, with the path of the file in the copy of this folder."""
    arguments = list(request.arguments)
    if request.file is None:
        return arguments
    path = pathlib.Path(os.path.relpath(request.file))
    if path.parts[:1] == ("..",):
        raise refuse(
            f"{request.file!r}, and the current folder is {os.getcwd()}.",
            "SkyPilot copies the current folder to each machine, and the file is outside of it.",
            "Copy the file into the current folder, or call jaxdist launch in "
            f"{path.resolve().parent}.",
            kind=LaunchError,
        )
    arguments[request.position] = str(path)
    return arguments


def _write_run(request: Request, arguments: list[str]) -> str:
    each = request.processes_of_host
    places = " ".join(map(str, range(each)))
    task = {"type": "worker", "index": "INDEX"}
    config = json.dumps({"cluster": {"worker": ["WORKERS"]}, "task": task})
    config = config.replace('"', '\\"')
    config = config.replace('\\"WORKERS\\"', "$workers").replace('\\"INDEX\\"', "$index")
    lines = [
        "workers=",
        "for host in $SKYPILOT_NODE_IPS; do",
        f"  for place in {places}; do",
        f'    workers="$workers${{workers:+, }}\\"$host:$(({_PORT} + place))\\""',
        "  done",
        "done",
        "processes=",
        f"for place in {places}; do",
        f"  index=$((SKYPILOT_NODE_RANK * {each} + place))",
        f'  export TF_CONFIG="{config}"',
        *_choose_gpus(request),
        f"  {shlex.join(['python', *arguments])} &",
        '  processes="$processes $!"',
        "done",
        "code=0",
        "for process in $processes; do",
        '  wait "$process" || code=$?',
        "done",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _choose_gpus(request: Request) -> list[str]:
    if request.gpu is None or request.processes_of_host == 1:
        return []
    count = request.devices_of_each
    first, last = f"$((place * {count}))", f"$((place * {count} + {count - 1}))"
    return [f"  export CUDA_VISIBLE_DEVICES=$(seq -s , {first} {last})"]


@called(_CALLER)
def refuse_tasks(request: TaskRequest) -> str:
    """Raise an error: a SkyPilot task cannot describe such a job.

    Raises:
        LaunchError: Always.
    """
    counts = f"--ps {request.ps} --workers {request.workers}"
    raise refuse(
        f"{counts}.",
        "SkyPilot runs one command on each machine, and its task ends when all of them have "
        "ended. Parameter servers and workers run until they are ended, and a machine does "
        "not learn that the chief on another one has ended. One that is killed would start all "
        "machines again.",
        f"On one machine, let the command be: jaxdist launch {counts} ... . On several, start Ray "
        f"in the task, and call on the first machine: jaxdist launch --on ray {counts} ...",
        kind=LaunchError,
    )
