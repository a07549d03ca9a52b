"""`jaxdist new`: a project that runs at once."""

import argparse
from pathlib import Path

from jaxdist._projects import write_project


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
    # As text: a `Path` of an empty text is the current folder.
    files = write_project(arguments.name)
    for path in files:
        print(Path(arguments.name) / path.name)
    print(f"\nTrain: cd {arguments.name} && python train.py")
    return 0
