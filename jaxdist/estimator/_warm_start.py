"""Warm starts: initial values from the checkpoint of another model."""

import pathlib
import re
from typing import Any, NamedTuple

from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxdist._called import call_as, name_call, refuse
from jaxdist._checkpoints import Checkpoints, put_into, to_plain
from jaxdist._validate import as_local_path, as_path, check_instance, check_text
from jaxdist.errors import CheckpointError, ShapeError
from jaxdist.estimator._model import Built
from jaxdist.estimator._running import CheckpointChoice, ModelFolder


class WarmStartSettings(NamedTuple):
    """Which initial values a model takes from the checkpoint of another one. A named tuple.

    Args:
        ckpt_to_initialize_from: The folder of a model, or a checkpoint in it.
        vars_to_warm_start: A regular expression. A variable of a module is taken if it matches the
            whole name, such as `model.dense.kernel`.
        var_name_to_prev_var_name: Names in the checkpoint by names in the model, where they
            differ.

    Example:
        >>> jaxdist.estimator.WarmStartSettings("runs/a", r"model\\.dense.*").vars_to_warm_start
        'model\\\\.dense.*'

    Source:
        `tf.estimator.WarmStartSettings`.
    """

    ckpt_to_initialize_from: Any
    vars_to_warm_start: str = ".*"
    var_name_to_prev_var_name: dict[str, str] | None = None


def read_settings(given: Any) -> WarmStartSettings | None:
    """Return the settings from the argument `warm_start_from`.

    Raises:
        ArgumentTypeError: The value is of the wrong type.
        ArgumentError: The path is empty, or the pattern is not valid.
    """
    if given is None:
        return None
    if isinstance(given, WarmStartSettings):
        name = "ckpt_to_initialize_from"
        return call_as("estimator.WarmStartSettings", _check_settings, given, name)
    return _check_settings(WarmStartSettings(given), "warm_start_from")


def _check_settings(settings: WarmStartSettings, name: str) -> WarmStartSettings:
    as_path(name, settings.ckpt_to_initialize_from, "runs/a")
    check_text("vars_to_warm_start", settings.vars_to_warm_start, ".*")
    try:
        re.compile(settings.vars_to_warm_start)
    except re.error as error:
        raise refuse(
            f"vars_to_warm_start={settings.vars_to_warm_start!r}: {error}.",
            "It is a regular expression, which the whole name of a variable matches.",
            "Pass for instance vars_to_warm_start=r'model\\.dense.*'.",
        ) from None
    names = settings.var_name_to_prev_var_name
    if names is not None:
        remedy = "Pass {'model.kernel': 'model.dense.kernel'}."
        check_instance("var_name_to_prev_var_name", names, dict, "a dict of names", remedy)
    return settings


def find_checkpoint(path: Any) -> CheckpointChoice:
    """Return the checkpoint of a path: the folder of a model, or a checkpoint itself.

    Raises:
        CheckpointError: There is no checkpoint at the path.
    """
    caller = name_call()
    folder = pathlib.Path(as_local_path(f"{caller} was given {path!r}", str(path)))
    if folder.name.isdigit() and folder.is_dir():
        return CheckpointChoice(folder.parent, int(folder.name))
    latest = ModelFolder(folder, None, 1).find_latest()
    if latest is None:
        raise CheckpointError(
            f"{caller} found no checkpoint in {folder}.\n\n"
            "A checkpoint is a folder that is called by its step, in the folder 'checkpoints' of a "
            "model.\n\nPass what Estimator.latest_checkpoint() returns, or train first."
        )
    return latest


def _read_all(choice: CheckpointChoice) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return shapes and values of all arrays of a checkpoint."""
    leaves = choice.read_leaves()
    with Checkpoints(choice.folder) as checkpoints:
        return leaves, checkpoints.restore(choice.step, like=leaves).state


def warm_start(settings: WarmStartSettings, built: Built) -> None:
    """Write values of another checkpoint into the modules of a model.

    Raises:
        CheckpointError: The checkpoint does not exist, or lacks a variable.
        ShapeError: A variable has another shape in the checkpoint.
        ArgumentError: The pattern matches no variable.
    """
    caller = "Estimator.train"
    given = settings.ckpt_to_initialize_from
    choice = call_as(
        f"estimator.WarmStartSettings was given ckpt_to_initialize_from={given!r}, and",
        find_checkpoint,
        given,
    )
    target = {"modules": built.modules}
    flat, treedef = tree_flatten_with_path(to_plain(target))
    choice, (leaves, saved) = choice.follow(_read_all)
    values: list[Any] = []
    taken = 0
    for path, leaf in flat:
        name = keystr(path, simple=True, separator=".").removeprefix("modules.")
        if not re.fullmatch(settings.vars_to_warm_start, name):
            values.append(leaf)
            continue
        taken += 1
        before = (settings.var_name_to_prev_var_name or {}).get(name, name)
        found = saved.get(f"modules.{before}")
        if found is None:
            raise CheckpointError(
                f"{caller}: warm_start_from names {choice.path}, which has no variable "
                f"{before!r}.\n\nIt has {', '.join(sorted(_list_names(leaves)))}.\n\n"
                f"Pass var_name_to_prev_var_name={{{name!r}: ...}}, or leave the variable out of "
                "vars_to_warm_start."
            )
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ShapeError(
                f"{caller}: {name!r} is {leaf.dtype}{list(leaf.shape)}, and {before!r} in "
                f"{choice.path} is {found.dtype}{list(found.shape)}.\n\n"
                "A variable takes its first value from one of the same shape and dtype.\n\n"
                "Leave the variable out of vars_to_warm_start."
            )
        values.append(found)
    if not taken:
        raise call_as(
            "estimator.WarmStartSettings",
            refuse,
            f"vars_to_warm_start={settings.vars_to_warm_start!r}, which matches no variable.",
            "The model has "
            f"{', '.join(keystr(p, simple=True, separator='.')[8:] for p, _ in flat)}.",
            "Pass for instance '.*', which matches all.",
        )
    put_into(target, tree_unflatten(treedef, values))


def _list_names(leaves: Any) -> list[str]:
    return [n.removeprefix("modules.") for n in leaves if n.startswith("modules.")]
