"""`jaxdist launch --print`: prints a file that starts the same job on a cluster."""

import argparse

from jaxdist._called import called, refuse
from jaxdist._launching import TARGETS, ClusterJob, Program, Request, TaskRequest, say

_OPTIONS = ("name", "gpu", "image", "install", "cpus", "memory", "hosts", "partition", "time")
_ONLY_HERE = ("elastic", "report_seconds", "grace_seconds", "on")


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add `--print`, and the options that a cluster needs."""
    group = parser.add_argument_group(
        "a file for a cluster", "--print starts nothing here; these options go into the file"
    )
    group.add_argument(
        "--print", dest="target", choices=tuple(TARGETS), help="print a file that starts this job"
    )
    group.add_argument("--name", help="name of the job; that of the script if left out")
    group.add_argument(
        "--gpu", metavar="KIND", help="use GPUs of this kind (any for jobset and slurm), not CPUs"
    )
    group.add_argument("--image", help="jobset, skypilot: image of a container with the program")
    group.add_argument(
        "--install",
        metavar="REQUIREMENT",
        help="jobset, skypilot: what pip installs as jaxdist, without an image",
    )
    group.add_argument("--cpus", type=int, metavar="N", help="CPU cores of each process")
    group.add_argument("--memory", type=int, metavar="GIB", help="memory of each process")
    group.add_argument("--hosts", type=int, metavar="N", help="slurm, skypilot: machines")
    group.add_argument("--partition", help="slurm: partition")
    group.add_argument("--time", metavar="H:MM:SS", help="jobset, slurm: time limit")


@called("jaxdist launch")
def check_options(arguments: argparse.Namespace) -> None:
    """Raise if an option for files comes without `--print`, or an option for processes with it.

    Raises:
        ArgumentError: There is such an option.
    """
    prints = arguments.target is not None
    for name in _ONLY_HERE if prints else _OPTIONS:
        value = getattr(arguments, name)
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        given = f"{option} {value}"
        if prints:
            raise refuse(
                f"--print {arguments.target} and {given}.",
                f"{option} belongs to processes that the launcher itself starts, and --print "
                "starts none.",
                f"Leave out {option}.",
            )
        raise refuse(
            f"{given}, and no --print.",
            f"{option} goes into a file for a cluster.",
            f"Add --print {' or --print '.join(TARGETS)}, or leave out {option}.",
        )


def print_file(arguments: argparse.Namespace, program: Program, count: int) -> int:
    """Print the file. Return the exit code.

    Raises:
        ArgumentError: A number is out of range.
        LaunchError: The file would not do what the options request.
    """
    request = _make_request(arguments, program, count)
    print(TARGETS[arguments.target].make(request), end="")
    _warn(arguments.target, request)
    return 0


@called(lambda arguments: f"jaxdist launch --print {arguments.target}")
def print_task_file(arguments: argparse.Namespace, program: Program, job: ClusterJob) -> int:
    """Print the file of a job with parameter servers. Return the exit code.

    Raises:
        ArgumentError: A number is out of range, or a number of machines is given.
        LaunchError: The file would not do what the options request.
    """
    if arguments.hosts is not None:
        raise refuse(
            f"--ps {job.ps} --workers {job.workers} and --hosts {arguments.hosts}.",
            "Tasks of several kinds need different amounts, and the cluster chooses their "
            "machines.",
            "Leave out --hosts.",
        )
    request = _make_request(arguments, program, sum(job.counts.values()))
    tasks = TaskRequest(
        request, job.server_command[1:], job.ps, job.workers, arguments.snapshot_directory
    )
    print(TARGETS[arguments.target].make_for_tasks(tasks), end="")
    _warn(arguments.target, request)
    return 0


def _make_request(arguments: argparse.Namespace, program: Program, count: int) -> Request:
    return Request(
        program.command[1:],
        count,
        file=program.file,
        is_training=program.is_training,
        devices=arguments.devices_per_process,
        restarts=arguments.restarts,
        **{name: getattr(arguments, name) for name in _OPTIONS},
    )


def _warn(target: str, request: Request) -> None:
    if TARGETS[target].installs and request.image is None and request.install is None:
        say(
            f"the file installs {request.requirements[0]} from your package index. If it has no "
            "such release, pass --install with a source of jaxdist, or --image."
        )
