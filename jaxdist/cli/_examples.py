"""`jaxdist examples`: lists or copies the configurations and notebooks that come with jaxdist."""

import argparse
import json
from pathlib import Path

from jaxdist._examples import copy_examples, list_configs, list_notebooks
from jaxdist._validate import as_path


def add_examples(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    shared: argparse.ArgumentParser,
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "examples",
        parents=[shared],
        allow_abbrev=False,
        help="list the configurations and notebooks of jaxdist, or copy them",
        description=(
            "List the configurations and notebooks that come with jaxdist. With FOLDER, copy them "
            "into its folders configs and notebooks, which must not exist."
        ),
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="where to copy them")
    parser.set_defaults(command=show_or_copy)


def show_or_copy(arguments: argparse.Namespace) -> int:
    """List the examples, or copy them and list the copies."""
    if arguments.folder is not None:
        folder = Path(as_path("jaxdist examples", "FOLDER", arguments.folder, "examples"))
        for path in copy_examples(folder):
            print(folder / path.relative_to(folder.absolute()))
        return 0
    print("Configurations, for jaxdist train NAME and jaxdist plan NAME --topology MACHINE:\n")
    for name in list_configs():
        print(f"  {name}")
    print("\nNotebooks:\n")
    notebooks = list_notebooks()
    width = max(map(len, notebooks), default=0)
    for name, path in notebooks.items():
        print(f"  {name:{width}}  {_read_title(path)}")
    print("\nCopy all of them: jaxdist examples FOLDER")
    return 0


def _read_title(notebook: Path) -> str:
    first = json.loads(notebook.read_text("utf-8"))["cells"][0]
    return "".join(first["source"]).partition("\n")[0].lstrip("# ")
