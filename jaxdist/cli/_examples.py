"""`jaxdist new` writes a project that runs at once; `jaxdist examples` copies those of jaxdist."""

import argparse
import json
import shlex
from pathlib import Path

from jaxdist._called import called
from jaxdist._examples import copy_examples, list_configs, list_notebooks
from jaxdist._projects import write_project
from jaxdist._validate import as_path


@called("jaxdist new")
def write(arguments: argparse.Namespace) -> int:
    """Write the project, and print its files and the next command."""
    name = as_path("NAME", arguments.name, "flowers")
    for path in write_project(name):
        print(Path(name) / path.name)
    print(f"\nTrain: cd {shlex.quote(name)} && python train.py")
    return 0


@called("jaxdist examples")
def show_or_copy(arguments: argparse.Namespace) -> int:
    """List the examples, or copy them and list the copies."""
    if arguments.folder is not None:
        folder = Path(as_path("FOLDER", arguments.folder, "examples"))
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
