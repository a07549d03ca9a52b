"""The arguments of each command, without what the commands need to run.

`jaxdist --help` and a wrong argument load no JAX: `_commands` imports a command when it is run.
"""

import argparse
import functools
from pathlib import Path
from typing import TypeAlias

from jaxdist import _lint, cluster_resolver, jobs
from jaxdist.cli import _commands
from jaxdist.cli._launch_command.launch import ParseArguments, add_launch
from jaxdist.cli._server_options import add_server_options

_SIZES = ("1KiB", "16KiB", "256KiB", "2MiB", "8MiB")


# Adds a command by its name; `keywords` are what all commands have.
AddParser: TypeAlias = "functools.partial[argparse.ArgumentParser]"


def add_commands(add: AddParser, parse: ParseArguments) -> None:
    """Add all commands, in the order of the help; `parse` reads the arguments of a command."""
    _add_train(add)
    _add_new(add)
    _add_examples(add)
    _add_plan(add)
    _add_trace(add)
    _add_bench(add)
    _add_lint(add)
    _add_resolve(add)
    add_launch(add, parse)
    _add_server(add)
    _add_info(add)
    _add_chips(add)


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the configuration file, and the option that overrides its entries."""
    parser.add_argument(
        "config",
        help=(
            "a TOML file; or the name of one that comes with jaxdist, such as digits_mirrored: "
            "jaxdist examples lists them"
        ),
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override an entry of the file; may be given many times",
    )


def _add_train(add: AddParser) -> None:
    parser = add(
        "train",
        help=f"train a task: {', '.join(jobs.TASK_NAMES)}",
        description=(
            "Train the task that the configuration names, on all accelerators or on virtual CPU "
            "devices. A second run resumes from the newest checkpoint."
        ),
    )
    _add_job_arguments(parser)
    parser.add_argument(
        "--resume-from-previous",
        action="store_true",
        help="if the newest checkpoint is damaged, resume from the one before it",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume with values that differ from those of the checkpoint",
    )
    parser.set_defaults(command=lambda arguments: _commands.train(arguments))


def _add_new(add: AddParser) -> None:
    parser = add(
        "new",
        help="write a project that trains at once: config, model, data, script, test, notebook",
        description=(
            "Write a new folder with a configuration, a model, data, a script that trains, a test "
            "and a notebook. All of them run at once; replace the data and the model with yours."
        ),
    )
    parser.add_argument("name", metavar="NAME", help="the new folder")
    parser.set_defaults(command=lambda arguments: _commands.write(arguments))


def _add_examples(add: AddParser) -> None:
    parser = add(
        "examples",
        help="list the configurations and notebooks of jaxdist, or copy them",
        description=(
            "List the configurations and notebooks that come with jaxdist. With FOLDER, copy them "
            "into its folders configs and notebooks, which must not exist."
        ),
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="where to copy them")
    parser.set_defaults(command=lambda arguments: _commands.show_or_copy(arguments))


def _add_plan(add: AddParser) -> None:
    parser = add(
        "plan",
        help="memory and time of a job on TPUs or GPUs that this machine lacks",
        description=(
            "Compile the train step of a configuration for a slice of TPUs, or for GPUs, with "
            "their own compiler, on this machine, and print memory, work, collectives, bounds and "
            "the predicted time of a step. Needs libtpu and no TPU, or JAX's CUDA plugin and no "
            "GPU."
        ),
    )
    _add_job_arguments(parser)
    parser.add_argument(
        "--topology",
        required=True,
        metavar="MACHINE",
        help="a slice of TPUs, such as v5p:8x8x8 or v5e:4x4; or GPUs, such as h100:4x8 (hosts x "
        "GPUs of a host) or gb200:2x18x4 (NVLink domains x hosts x GPUs)",
    )
    parser.add_argument("--slices", type=int, metavar="N", help="how many such slices of TPUs")
    parser.add_argument(
        "--logical",
        metavar="SHAPE",
        help="logical devices of a replica: their number, or chips in x, y and z, such as 2x2",
    )
    names = ", ".join(dict.fromkeys(("replicated", "sharded_update", *jobs.PARTITIONS)))
    parser.add_argument("--rules", metavar="NAME", help=f"how state is placed: {names}")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="ROWS",
        help="rows of a batch, of all replicas; each keeps those of the configuration if left out",
    )
    parser.add_argument(
        "--xla",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536; may be given "
        "many times; the section [compiler] of a configuration has them too",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="compare rules and logical devices, and rank them"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile once: no comparison with one device, no search for a batch that fits",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="save the compiled program, for jaxdist train --set training.program=FILE there",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the assignment")
    parser.set_defaults(command=lambda arguments: _commands.plan(arguments))


def _add_trace(add: AddParser) -> None:
    parser = add(
        "trace",
        help="where the time of a job's step goes, from a profile",
        description=(
            "Run a few train steps of a configuration, record a profile of JAX, and print the time "
            "of a step by compute, collectives, host and idle. It trains nothing: no checkpoint "
            "and no file of the job is read or written."
        ),
    )
    _add_job_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="how many steps are recorded (5)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help="where the profile is written (profile)",
    )
    parser.set_defaults(command=lambda arguments: _commands.trace(arguments))


def _add_bench(add: AddParser) -> None:
    bench = add(
        "bench",
        parents=[],
        help="measure this machine",
        description="Measure the numbers from which jaxdist predicts times.",
    )
    kinds = bench.add_subparsers(dest="what", metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "collectives",
        **add.keywords,
        help="latency and bandwidth of all-reduces",
        description=(
            "Time all-reduces of several sizes over the devices of this machine, and print the "
            "latency and bandwidth that explain them, below which size arrays are packed, and from "
            "which size another algorithm is predicted to be faster."
        ),
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="how many devices; all accelerators, or 8 of the CPU, if left out",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=list(_SIZES),
        metavar="SIZE",
        help="bytes on each device, such as 4096, 64KiB or 1MiB; two or more",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="how often everything is measured"
    )
    parser.add_argument(
        "--save",
        metavar="PATH",
        help="write a file that jaxdist.config.links and JAXDIST_LINKS read",
    )
    parser.set_defaults(command=lambda arguments: _commands.bench_collectives(arguments))


def _add_lint(add: AddParser) -> None:
    parser = add(
        "lint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="find mistakes in programs that the guides warn about",
        description=(
            "Find mistakes in Python files and notebooks that the guides warn about, and say how "
            "to correct them.\nRuns nothing. The exit code is 0, 1 if something was found, 2 for a "
            "file that cannot be read.\n\nRules:\n"
            + "\n".join(f"  {rule.code} {rule.name:<18}{rule.reason}" for rule in _lint.RULES)
            + "\n\nThe comment `# jaxdist: ignore[JD001]` switches a rule off in its line."
        ),
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or a folder")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.set_defaults(command=lambda arguments: _commands.lint(arguments))


def _add_resolve(add: AddParser) -> None:
    parser = add(
        "resolve",
        help="which task of its job this process would be, and what looks wrong",
        description=(
            "Print which task of its job this process would be, which one is process 0, what would "
            "be bound, and what looks wrong. Starts nothing. The exit code is 0, 1 with warnings, "
            "2 with errors."
        ),
    )
    environments = cluster_resolver.ENVIRONMENTS
    parser.add_argument(
        "--from", dest="source", choices=tuple(environments), help="by default the one found"
    )
    parser.add_argument("--probe", action="store_true", help="connect to process 0, once")
    parser.add_argument("--task-type", metavar="JOB", help="the job of this process")
    parser.add_argument("--task-id", type=int, metavar="N", help="its number in the job")
    with_port = ", ".join(name for name, one in environments.items() if one.has_port)
    parser.add_argument("--port", type=int, help=f"{with_port}: the port of addresses")
    for name, environment in environments.items():
        group = parser.add_argument_group(name) if environment.options else parser
        for option, keywords in environment.options.items():
            group.add_argument(f"--{option.replace('_', '-')}", **keywords)
    parser.set_defaults(command=lambda arguments: _commands.show_resolved(arguments))


def _add_server(add: AddParser) -> None:
    parser = add(
        "server",
        help="run a parameter server or a worker of a cluster",
        description=(
            "Run one task of the cluster that TF_CONFIG describes, until the process is ended. "
            "JAXDIST_SECRET_FILE or JAXDIST_SECRET has the secret of the job, which a task needs "
            "at an address that other machines reach."
        ),
    )
    add_server_options(parser)
    parser.set_defaults(command=lambda arguments: _commands.run_server(arguments))


def _add_info(add: AddParser) -> None:
    info = add(
        "info",
        help="versions, devices, topology, memory, extras",
        description="Print versions, devices, topology, memory, and what each extra would add.",
    )
    info.add_argument(
        "--all",
        action="store_true",
        help="each device, the settings of several processes, and the commands of all extras",
    )
    info.set_defaults(command=lambda arguments: _commands.show_info(shows_all=arguments.all))


def _add_chips(add: AddParser) -> None:
    chips = add(
        "chips",
        help="peaks of TPUs and GPUs, with their sources",
        description="Print the table of chips that plans use: TPUs and GPUs.",
    )
    chips.set_defaults(command=lambda _: _commands.show_chips())
