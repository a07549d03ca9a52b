"""`jaxdist new`: writes a project that can run at once."""

import argparse
import shlex
from pathlib import Path

from jaxdist._projects import write_project
from jaxdist._validate import as_path


def add_new(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    shared: argparse.ArgumentParser,
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "new",
        parents=[shared],
        allow_abbrev=False,
        help="write a project that trains at once: config, model, data, script, test, notebook",
        description=(
            "Write a new folder with a configuration, a model, data, a script that trains, a test "
            "and a notebook. All of them run at once; replace the data and the model by yours."
        ),
    )
    parser.add_argument("name", metavar="NAME", help="the new folder")
    parser.set_defaults(command=write)


def write(arguments: argparse.Namespace) -> int:
    """Write the project, and print its files and the next command."""
    name = as_path("jaxdist new", "NAME", arguments.name, "flowers")
    for path in write_project(name):
        print(Path(name) / path.name)
    print(f"\nTrain: cd {shlex.quote(name)} && python train.py")
    return 0
