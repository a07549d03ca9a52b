"""`jaxdist launch --ps`: the options of jobs with parameter servers."""

import argparse
import pathlib
import sys

from jaxdist import _launching
from jaxdist._called import called, refuse
from jaxdist._validate import as_path
from jaxdist.cli._launch_command.files import print_task_file

# Options of jobs whose processes are all alike.
_ONLY_ALIKE = {"count": "-n", "elastic": "--elastic", "report_seconds": "--report-seconds"}
_ONLY_HERE = {
    "workers": "--workers",
    "evaluator": "--evaluator",
    "snapshot_directory": "--snapshot-directory",
    "snapshot_seconds": "--snapshot-seconds",
    "module": "--module",
    "plain_servers": "--plain-servers",
}


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add `--ps`, `--workers` and related options."""
    group = parser.add_argument_group(
        "parameter servers",
        "--ps P --workers W starts P parameter servers, W workers and a chief, instead of N equal "
        "processes. All run the script, in which the first two call jaxdist.Server(...).join(). "
        "One that is killed is started again, and the others continue. When the chief ends, the "
        "launcher ends the others, and exits with its code.",
    )
    group.add_argument("--ps", type=int, metavar="P", help="number of parameter servers")
    group.add_argument("--workers", type=int, metavar="W", help="number of workers")
    group.add_argument(
        "--chief", type=int, choices=(1,), help="number of chiefs; there is always one"
    )
    group.add_argument(
        "--evaluator",
        action="store_true",
        default=None,
        help=(
            "also start an evaluator, which runs the script and follows the checkpoints: for "
            "estimator.train_and_evaluate. When the chief has ended well, the launcher waits until "
            "the evaluator ends, too"
        ),
    )
    group.add_argument(
        "--snapshot-directory",
        metavar="DIR",
        help=(
            "where parameter servers write snapshots: a folder, with --on ray and --print slurm "
            "one that all nodes share, with --print jobset a PersistentVolumeClaim; a folder that "
            "is deleted at the end if left out"
        ),
    )
    group.add_argument(
        "--snapshot-seconds",
        type=float,
        metavar="S",
        help=(
            "with --plain-servers or train: how often a snapshot is written; 60 if left out. What "
            "changed after the last one is lost with a server that is killed"
        ),
    )
    group.add_argument(
        "--plain-servers",
        action="store_true",
        default=None,
        help=(
            "parameter servers and workers run `jaxdist server` and not the script, as they do for "
            "train; dataset functions are then those of --module"
        ),
    )
    group.add_argument(
        "--module",
        action="append",
        metavar="NAME",
        help="with --plain-servers: a module whose dataset functions workers may call",
    )


@called("jaxdist launch")
def is_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether the options describe a job with parameter servers.

    Raises:
        ArgumentError: Options belong to two kinds of jobs, or one is missing.
    """
    if arguments.ps is None and arguments.chief is None:
        given = [o for name, o in _ONLY_HERE.items() if getattr(arguments, name) is not None]
        if not given:
            return False
        raise refuse(
            f"{given[0]}, and no --ps.",
            f"{given[0]} belongs to a job with parameter servers.",
            "Pass for instance: jaxdist launch --ps 1 --workers 2 script.py",
        )
    for name, what in (("ps", "parameter servers"), ("workers", "workers")):
        if getattr(arguments, name) is None:
            raise refuse(
                f"no number of {what}.",
                "A job with parameter servers has --ps and --workers.",
                "Pass for instance: jaxdist launch --ps 1 --workers 2 script.py",
            )
    wrong = [o for name, o in _ONLY_ALIKE.items() if getattr(arguments, name) is not None]
    if wrong:
        raise refuse(
            f"--ps {arguments.ps} and {wrong[0]}.",
            f"{wrong[0]} belongs to jobs whose processes are all alike.",
            f"Leave out {wrong[0]}.",
        )
    if arguments.module and not arguments.plain_servers:
        raise refuse(
            f"--module {arguments.module[0]}, and no --plain-servers.",
            "Workers that run the script have the functions of the script, and the modules that "
            "it gives to jaxdist.Server.",
            "Add --plain-servers, or leave out --module.",
        )
    return True


@called("jaxdist launch")
def launch_with_servers(arguments: argparse.Namespace, program: "_launching.Program") -> int:
    """Start the tasks, and return the exit code when all have ended.

    Raises:
        LaunchError: A task cannot be started.
        ArgumentError: A number is out of range.
    """
    if arguments.evaluator and (program.is_training or arguments.target or arguments.on):
        other = "train" if program.is_training else f"--print {arguments.target}"
        raise refuse(
            f"--evaluator and {other if not arguments.on else '--on ray'}.",
            "An evaluator is started on this machine, for a script that calls "
            "estimator.train_and_evaluate.",
            "Leave --evaluator out, and start the script with the task 'evaluator' in TF_CONFIG.",
        )
    options = [part for name in arguments.module or [] for part in ("--module", name)]
    is_plain = bool(arguments.plain_servers or program.is_training)
    if arguments.snapshot_seconds is not None:
        if not is_plain:
            raise refuse(
                f"--snapshot-seconds {arguments.snapshot_seconds:g}, and parameter servers run "
                "the script.",
                "The script makes its own jaxdist.Server.",
                "Pass snapshot_seconds= to jaxdist.Server in the script, or add --plain-servers.",
            )
        options += ["--snapshot-seconds", str(arguments.snapshot_seconds)]
    plain = [sys.executable, "-m", "jaxdist", "server", *options]
    directory = arguments.snapshot_directory
    if directory is not None:
        directory = as_path("--snapshot-directory", directory, "snapshots")
        arguments.snapshot_directory = directory
    grace = arguments.grace_seconds
    job = _launching.ClusterJob(
        program.command,
        # `jaxdist train` is the program of the chief only.
        plain if is_plain else program.command,
        arguments.ps,
        arguments.workers,
        devices_per_process=arguments.devices_per_process,
        restarts=arguments.restarts,
        snapshot_directory=None if directory is None else pathlib.Path(directory).absolute(),
        patience=_launching.Patience() if grace is None else _launching.Patience(grace=grace),
        evaluators=1 if arguments.evaluator else 0,
    )
    if arguments.target is not None:
        return print_task_file(arguments, program, job)
    if arguments.on == "ray":
        with _launching.connect_to_ray() as nodes:
            return _launching.launch_cluster(job, nodes.run_tasks)
    return _launching.launch_cluster(job)
