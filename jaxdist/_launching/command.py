"""Makes the command of each process, from a Python script or a module."""

import dataclasses
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Sequence

from jaxdist._called import refuse
from jaxdist.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Program:
    """What the processes of a job run.

    Attributes:
        command: This Python interpreter, and its arguments.
        file: The script or the configuration among the arguments; None for a module.
        is_training: Whether the command is `jaxdist train`.
    """

    command: Sequence[str]
    file: str | None
    is_training: bool = False


def make_command(target: str, arguments: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Return the command that runs a script or a module with this Python interpreter.

    Args:
        target: Path of the script, or name of the module.
        arguments: Its arguments.
        is_module: Whether `target` is a module, as for `python -m`.

    Raises:
        LaunchError: The script or module does not exist, or the script cannot be read.
    """
    if is_module:
        _check_module(target)
        return [sys.executable, "-m", target, *arguments]
    _check_script(target)
    return [sys.executable, target, *arguments]


def _check_script(target: str) -> None:
    path = pathlib.Path(target)
    if not path.exists():
        raise refuse(
            f"the script {target!r}, and no such file exists.",
            f"Paths are relative to the current folder, {os.getcwd()}.",
            "Pass the path of a Python file, -m and the name of a module, or train and a "
            "configuration.",
            kind=LaunchError,
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise refuse(
            f"{target!r}, which is a folder.",
            "Python runs a file, or a folder with a file __main__.py.",
            "Pass the path of a Python file.",
            kind=LaunchError,
        )
    if not os.access(path, os.R_OK):
        raise refuse(
            f"the script {target!r}, which this user cannot read.",
            "Each process reads the script.",
            f"Make it readable: chmod u+r {target}",
            kind=LaunchError,
        )


def _check_module(target: str) -> None:
    top = target.partition(".")[0]
    # `python -m` also looks in the current folder. Only the top-level package is looked up, so
    # that no package is imported here.
    where = [os.getcwd(), *sys.path]
    if top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, where):
        return
    raise refuse(
        f"-m {target}, and the module {top!r} does not exist.",
        f"Modules are looked for in {os.getcwd()} and in the paths of {sys.executable}.",
        "Pass the name of a module that `python -m` runs, or the path of a script without -m.",
        kind=LaunchError,
    )
