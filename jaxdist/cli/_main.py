"""The command line: parses its arguments, and reports errors."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence

from jaxdist._launching import record_error
from jaxdist.cli._bench import add_bench
from jaxdist.cli._examples import add_examples
from jaxdist.cli._info import show_chips, show_info
from jaxdist.cli._job_arguments import add_job_arguments
from jaxdist.cli._launch_command.launch import add_launch
from jaxdist.cli._lint import add_lint
from jaxdist.cli._new import add_new
from jaxdist.cli._plan import add_plan
from jaxdist.cli._resolve import add_resolve
from jaxdist.cli._server import add_server
from jaxdist.cli._trace import add_trace
from jaxdist.cli._train import train
from jaxdist.errors import JaxdistError
from jaxdist.jobs import TASKS, versions

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the name of the program; None for those of the process.

    Returns:
        The exit code: 0; 1 for a warning of `jaxdist resolve`, a finding of `jaxdist lint`, or a
        program that `jaxdist plan` could not save; 2 for an error of jaxdist or in the
        arguments; 130 after Ctrl-C; 141 if the reader of the output has ended.

    Example:
        >>> main(["train", "no_such_file.toml"])
        2
    """
    arguments = _make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except JaxdistError as error:
        # The message has the remedy, and a traceback would hide it. Other exceptions are bugs and
        # keep their traceback.
        if arguments.traceback:
            raise
        name = f"jaxdist {arguments.subcommand}"
        # Errors about the command itself begin with its name.
        said = str(error)
        print(said if said.startswith(name) else f"{name}: {said}", file=sys.stderr)
        # A launcher reads tracebacks from the output, but here there is none.
        record_error(error)
        return EXIT_ERROR
    except BrokenPipeError:
        # The broken pipe may be a different one.
        if not _is_output_closed():
            raise
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        if arguments.traceback:
            raise
        print(f"jaxdist {arguments.subcommand}: stopped by Ctrl-C", file=sys.stderr)
        return EXIT_INTERRUPTED


def _is_output_closed() -> bool:
    """Whether the reader of the output has ended, as `head` does; if so, drop the rest."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    # Python would try to write the rest at exit, and print a warning.
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxdist",
        description="The programming model of tf.distribute, on JAX.",
        allow_abbrev=False,
    )
    version = f"jaxdist {versions()['jaxdist']} (jax {versions()['jax']})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    # A parent parser: the option is accepted after the name of each command.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--traceback", action="store_true", help="show where an error was raised, all of it"
    )
    _add_train(commands, shared)
    add_new(commands, shared)
    add_examples(commands, shared)
    add_plan(commands, shared)
    add_trace(commands, shared)
    add_bench(commands, shared)
    add_lint(commands, shared)
    add_resolve(commands, shared)
    add_launch(commands, shared, parser.parse_args)
    add_server(commands, shared)
    info = commands.add_parser(
        "info",
        parents=[shared],
        allow_abbrev=False,
        help="versions, devices, topology, memory, extras",
        description="Print versions, devices, topology, memory, and what each extra would add.",
    )
    info.add_argument(
        "--all",
        action="store_true",
        help="each device, the settings of several processes, and the commands of all extras",
    )
    info.set_defaults(command=lambda arguments: show_info(shows_all=arguments.all))
    chips = commands.add_parser(
        "chips",
        parents=[shared],
        allow_abbrev=False,
        help="peaks of TPUs and GPUs, with their sources",
        description="Print the table of chips that plans are made with: TPUs and GPUs.",
    )
    chips.set_defaults(command=lambda _: show_chips())
    return parser


def _add_train(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    shared: argparse.ArgumentParser,
) -> None:
    parser = commands.add_parser(
        "train",
        parents=[shared],
        allow_abbrev=False,
        help=f"train a task: {', '.join(TASKS)}",
        description=(
            "Train the task that the configuration names, on all accelerators or on virtual CPU "
            "devices. A second run resumes from the newest checkpoint."
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--resume-from-previous",
        action="store_true",
        help="where the newest checkpoint is damaged, resume from the one before",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume with other values than the checkpoint was trained with",
    )
    parser.set_defaults(command=train)
