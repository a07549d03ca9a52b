"""`jaxdist launch`: starts several processes of one job on this machine."""

import argparse
import sys
from collections.abc import Callable, Sequence

from jaxdist import _launching, jobs
from jaxdist._called import call_as, called, refuse
from jaxdist._examples import find_config
from jaxdist.cli._launch_command.cluster import add_cluster_options, is_cluster, launch_with_servers
from jaxdist.cli._launch_command.files import add_file_options, check_options, print_file

_TRAIN = "train"
_ON_ONE, _ON_PROCESSES, _WITH_SERVERS = "auto", "multi_worker_mirrored", "parameter_server"
ParseArguments = Callable[[Sequence[str]], argparse.Namespace]


def add_launch(add: Callable[..., argparse.ArgumentParser], parse: ParseArguments) -> None:
    """Add the arguments of `jaxdist launch`; `parse` reads those of `jaxdist train`."""
    parser = add(
        "launch",
        help="start several processes on this machine",
        usage=(
            "jaxdist launch -n N [options] script.py [argument ...]\n"
            "       jaxdist launch -n N [options] -m module [argument ...]\n"
            "       jaxdist launch -n N [options] train CONFIG [argument ...]\n"
            "       jaxdist launch --ps P --workers W [options] script.py [argument ...]"
        ),
        description=(
            "Start N processes of one job on this machine, as workers of a "
            "MultiWorkerMirroredStrategy. Each line that they print begins with the number of the "
            "process. When one fails, the others are ended, and the first cause is printed last. "
            "The exit code is 0, that of the first process that failed, or 128 + N after signal N."
        ),
    )
    parser.add_argument("-n", dest="count", type=int, metavar="N", help="number of processes")
    parser.add_argument(
        "--elastic",
        metavar="LEAST:MOST",
        help=(
            "start MOST processes; when some are lost, all start again without them, as long as "
            "LEAST are left"
        ),
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="D",
        help="GPUs of each process, or virtual CPU devices where there is no GPU; 1 if left out",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="start all processes again after a failure, at most R times; 0 if left out",
    )
    usual = _launching.Patience()
    parser.add_argument(
        "--report-seconds",
        type=float,
        metavar="S",
        help=(
            "when one process fails, how long the others may take to report and to save before "
            f"they are ended; {usual.report:g} if left out"
        ),
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        metavar="S",
        help=f"time between SIGTERM and SIGKILL; {usual.grace:g} if left out",
    )
    parser.add_argument(
        "--on",
        choices=("ray",),
        help="start the processes on the nodes of a Ray cluster, each with a CPU or its GPUs",
    )
    add_cluster_options(parser)
    add_file_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, like python -m"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="a script, a module, or train and a configuration; then arguments of it",
    )
    parser.set_defaults(command=lambda arguments: launch_processes(arguments, parse))


def launch_processes(arguments: argparse.Namespace, parse: ParseArguments) -> int:
    """Start the processes, and return the exit code when all have ended.

    Raises:
        LaunchError: A process cannot be started.
        ArgumentError: A number is out of range, or there is no program to start.
        ConfigError: The configuration of `train` is not valid.
    """
    has_servers = is_cluster(arguments)
    least, count = (None, 0) if has_servers else _read_numbers(arguments.count, arguments.elastic)
    given = f"--ps {arguments.ps} --workers {arguments.workers}" if has_servers else f"-n {count}"
    program = list(arguments.program)
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise call_as(
            f"jaxdist launch {given}",
            refuse,
            "no script.",
            "After the options come a script, -m and a module, or train and a configuration.",
            f"Pass for instance: jaxdist launch {given} script.py",
        )
    check_options(arguments)
    made = _make_program(program, arguments.is_module, parse, None if has_servers else count)
    if has_servers:
        return launch_with_servers(arguments, made)
    if arguments.target is not None:
        return print_file(arguments, made, count)
    times = {"report": arguments.report_seconds, "grace": arguments.grace_seconds}
    job = _launching.Job(
        made.command,
        count,
        devices_per_process=arguments.devices_per_process,
        restarts=arguments.restarts,
        patience=_launching.Patience(**{n: time for n, time in times.items() if time is not None}),
        least=least,
    )
    if arguments.on == "ray":
        with _launching.connect_to_ray() as cluster:
            return _launching.launch(job, cluster.run_attempt)
    return _launching.launch(job)


@called("jaxdist launch")
def _make_program(
    program: Sequence[str], is_module: bool, parse: ParseArguments, count: int | None
) -> "_launching.Program":
    """Return the program; `count` is the number of equal processes, None with servers."""
    if is_module or program[0] != _TRAIN:
        command = _launching.make_command(program[0], program[1:], is_module=is_module)
        return _launching.Program(command, None if is_module else program[0])
    # Find mistakes here, and not once in each process.
    given = parse(program)
    kind = jobs.load_job_config(given.config, given.overrides).values.strategy.kind
    # Pass the path, since a file for a cluster may contain the text of the configuration.
    file = find_config(given.config)
    place = list(program).index(given.config)
    has_servers = count is None
    if has_servers != (kind == _WITH_SERVERS):
        options, others = ("--ps and --workers", "-n")
        if not has_servers:
            options, others = others, options
        raise refuse(
            f"{options}, and strategy.kind of {given.config} is {kind!r}.",
            "Parameter servers and workers are for the kind 'parameter_server', and equal "
            "processes for the other kinds.",
            f"Pass {others}, or --set strategy.kind="
            f"{_WITH_SERVERS if has_servers else _ON_PROCESSES}.",
        )
    if kind == _ON_ONE and count != 1:
        raise refuse(
            f"-n {count}, and strategy.kind of {given.config} is {_ON_ONE!r}.",
            f"{_ON_ONE!r} has the devices of one process, so each process would train alone, and "
            "write into the same folders.",
            f"Pass --set strategy.kind={_ON_PROCESSES}, or -n 1.",
        )
    arguments = [*program[:place], file, *program[place + 1 :]]
    command = [sys.executable, "-m", "jaxdist", *arguments]
    return _launching.Program(command, file, is_training=True)


@called("jaxdist launch")
def _read_numbers(count: int | None, elastic: str | None) -> tuple[int | None, int]:
    """Return the least number of processes, if there is one, and how many to start."""
    if count is not None and elastic is not None:
        raise refuse(
            f"-n {count} and --elastic {elastic}.",
            "--elastic LEAST:MOST has the number of processes too: it starts MOST.",
            f"Leave out one of the two, for instance: jaxdist launch --elastic {elastic} script.py",
        )
    if elastic is None:
        if count is None:
            raise refuse(
                "no number of processes.",
                "-n N starts N processes; --elastic LEAST:MOST continues when some are lost.",
                "Pass for instance: jaxdist launch -n 2 script.py",
            )
        return None, count
    least, colon, most = elastic.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise refuse(
            f"--elastic {elastic}.",
            "--elastic has two numbers: the fewest processes with which the job continues, and how "
            "many are started.",
            "Pass for instance: jaxdist launch --elastic 2:4 script.py",
        )
    return int(least), int(most)
