"""The command line: parses its arguments, and reports errors."""

import argparse
import functools
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist import _launching, jobs
from jaxdist.cli._parsers import add_commands
from jaxdist.errors import JaxdistError

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
    # A configuration may name a task in a file of the current directory. It comes last, so that no
    # file there takes the place of an installed module.
    if argv is None and not sys.flags.safe_path:
        sys.path.append("")
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
        text = str(error)
        print(text if text.startswith(name) else f"{name}: {text}", file=sys.stderr)
        # A launcher reads tracebacks from the output, where this error has none.
        _launching.record_error(error)
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


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    It refuses unknown arguments with the usage of its command. The parser of the program would
    show that of the program.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxdist",
        description="The programming model of tf.distribute, on JAX.",
        allow_abbrev=False,
    )
    version = f"jaxdist {jobs.versions()['jaxdist']} (jax {jobs.versions()['jax']})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="subcommand", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    # A parent parser: the option is accepted after the name of each command.
    shared = _CommandParser(add_help=False)
    shared.add_argument(
        "--traceback", action="store_true", help="show where an error was raised, all of it"
    )
    add = functools.partial(commands.add_parser, parents=[shared], allow_abbrev=False)
    add_commands(add, parser.parse_args)
    return parser
