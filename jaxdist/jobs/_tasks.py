"""Finds the tasks, and reads the configuration of a task from its file."""

import importlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxdist._called import called, name_call
from jaxdist._examples import find_config
from jaxdist._validate import ErrorNote, show
from jaxdist.errors import ConfigError
from jaxdist.jobs._config.checks import Abilities, check_strategy_entries
from jaxdist.jobs._config.load import LoadedConfig, load_config
from jaxdist.jobs._config.schema import JobConfig, check_config
from jaxdist.jobs._config.sources import check_sources, find_lines, find_nearest, read_text
from jaxdist.jobs._names import TASK_NAMES
from jaxdist.jobs._task import Task

# Note [How tasks are found]
# Every folder of `jaxdist/jobs` without an underscore is a task, and its name is the name of the
# task in configurations. The `__init__` of the folder has a name `TASK`: a subclass of `Task`. So
# a new task needs no change outside its folder. `module:Class` is the name of a user's task.


def _find_tasks() -> Mapping[str, type[Task[Any]]]:
    package = __name__.rpartition(".")[0]
    return MappingProxyType({n: importlib.import_module(f"{package}.{n}").TASK for n in TASK_NAMES})


_DEFAULT = "digits"
TASKS = _find_tasks()


@called("jobs.kind_of")
def kind_of(config: JobConfig) -> type[Task[Any]]:
    """Return the class of the task of a configuration.

    Args:
        config: A configuration whose `task` is one of `TASKS`, or `"module:Class"`.

    Raises:
        ConfigError: There is no such task; its module cannot be imported; or it is not complete.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> kind_of(DigitsConfig()).title
        'digits'
    """
    check_config(config)
    return _find(config.task, "config")


@called("jobs.load_job_config")
def load_job_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig[Any]:
    """Read the configuration of a job. Its entry `task` determines its sections.

    Args:
        path: The TOML file; or, if there is no such file, the name of one that comes with
            jaxdist, such as `digits_mirrored`. `task = "..."` is before its sections: the name of
            a task that comes with jaxdist, or `"module:Class"` for a subclass of `Task` in a module
            that can be imported. Without it, the task is "digits".
        overrides: The values of `--set`.

    Returns:
        The configuration of the task, and the origin of each entry.

    Raises:
        ConfigError: The task does not exist or is not complete, entries contradict each other, or
            `load_config` raises it.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp(), "job.toml")
        >>> _ = file.write_text('task = "digits"\\n[data]\\nbatch_size = 32\\n')
        >>> loaded = load_job_config(file)
        >>> loaded.values.task, loaded.values.data.batch_size
        ('digits', 32)
    """
    return _load(path, overrides)


@called("jobs.load_job")
def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Task[Any]:
    """Read a configuration as a task that can be planned. Reads no data.

    Args:
        path: The TOML file, as for `jaxdist train`.
        overrides: The values of `--set`.

    Returns:
        The task.

    Raises:
        ConfigError: As for `load_job_config`.

    Example:
        >>> from jaxdist.jobs import load_job
        >>> job = load_job("configs/digits_mirrored.toml")
        >>> job.title, job.rows_per_replica, job.rules[0]
        ('digits', 16, 'replicated')
    """
    config = _load(path, overrides).values
    return kind_of(config)(config)


def _load(path: Any, overrides: Any) -> LoadedConfig[Any]:
    caller = name_call()
    source, texts = check_sources(path, overrides)
    with ErrorNote(f"{caller} was given path={source!r} and overrides={texts!r}."):
        file = find_config(source)
        kind = _find_task_of(file)
        loaded = load_config(kind.config_type, file, texts)
        has = Abilities(bool(kind.stack), kind.divides_positions, bool(kind.experts))
        check_strategy_entries(loaded, can_split=kind.can_split, has=has)
        kind.check(loaded)
    return loaded


def _find_task_of(path: str | Path) -> type[Task[Any]]:
    # The task selects the schema, so read it before `load_config` checks all other entries.
    text = read_text(path)
    try:
        name = tomllib.loads(text).get("task", _DEFAULT)
    except tomllib.TOMLDecodeError:
        name = _DEFAULT  # load_config reports this error, with its line
    return _find(name, f"{path}, line {find_lines(text).get(('task',), 1)}")


def _find(name: Any, where: str) -> type[Task[Any]]:
    """Return the class of a task; `where` is the origin of its name."""
    if not isinstance(name, str) or ":" not in name:
        return _find_shipped(name, where)
    if not _OWN.fullmatch(name):
        raise ConfigError(
            f"{where}: task is {name!r}.\n\n"
            "A task of your own is written module:Class, with the module as in an import statement."
            '\n\nWrite for instance task = "my_tasks:WineTask".'
        )
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Other errors are those of the module's own code, and keep their traceback.
    except ImportError as error:
        raise ConfigError(
            f"{where}: task is {name!r}, and importing {module_name} failed: {error}.\n\n"
            "The module of a task, and what it imports, is in the current directory, in a folder "
            "of PYTHONPATH, or installed.\n\n"
            "Run the command in the folder of the module, set PYTHONPATH to that folder, or "
            "install what is missing."
        ) from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        own = [n for n, x in vars(module).items() if isinstance(x, type) and Task in x.__mro__[1:]]
        near = find_nearest(class_name, own) or next(iter(own), "WineTask")
        found = f"is {show(kind)}" if hasattr(module, class_name) else "does not exist"
        raise ConfigError(
            f"{where}: task is {name!r}, and {class_name} of {module_name} {found}.\n\n"
            "A task is a subclass of jaxdist.jobs.Task.\n\n"
            f'Write for instance task = "{module_name}:{near}".'
        )
    missing = [n for n in Task.__annotations__ if not hasattr(kind, n)]
    missing += sorted(kind.__abstractmethods__)
    if missing:
        raise ConfigError(
            f"{where}: task is {name!r}, and {class_name} does not define "
            f"{', '.join(missing)}.\n\n"
            "A task defines its model, its steps, its data, and how to describe its results.\n\n"
            f"Define {missing[0]} in the class; jaxdist.jobs.Task documents each of them."
        )
    return kind


_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _find_shipped(name: Any, where: str) -> type[Task[Any]]:
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    near = find_nearest(name, list(TASKS)) if isinstance(name, str) else None
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"{where}: there is no task {name!r}.\n\n"
        f"The tasks are {', '.join(map(repr, TASKS))}, and 'module:Class' of your own.{hint}\n\n"
        f'Write for instance task = "{near or _DEFAULT}".'
    )
