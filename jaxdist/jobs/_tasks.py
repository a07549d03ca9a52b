"""The registry of tasks, and the configuration of a task from its file."""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxdist._strategies import Strategy
from jaxdist._validate import ErrorNote, show
from jaxdist.errors import ArgumentTypeError, ConfigError
from jaxdist.jobs import topics_lm
from jaxdist.jobs._config.load import LoadedConfig, load_config
from jaxdist.jobs._config.schema import JobConfig
from jaxdist.jobs._config.sources import check_sources, find_lines, find_nearest, read_text
from jaxdist.jobs._job import Job
from jaxdist.jobs._task import Task
from jaxdist.jobs.digits import DigitsConfig, DigitsJob, DigitsTask, mirrored_strategy


@dataclasses.dataclass(frozen=True)
class TaskKind:
    """A task that a configuration can name.

    Attributes:
        schema: The class of its configuration.
        make_task: Loads the data and returns the task.
        make_job: Returns the job, which can be planned without data.
        make_strategy: Returns the configured strategy.
        num_cpu_devices: Returns the number of virtual CPU devices to request before JAX starts.
        check: Raises an error for entries that contradict each other on any devices.
    """

    schema: type[Any]
    make_task: Callable[[Any], Task]
    make_job: Callable[[LoadedConfig[Any]], Job]
    make_strategy: Callable[[Any], Strategy]
    num_cpu_devices: Callable[[Any], int]
    check: Callable[[LoadedConfig[Any]], None] = lambda loaded: None


_DEFAULT = "digits"
TASKS: Mapping[str, TaskKind] = MappingProxyType(
    {
        "digits": TaskKind(
            DigitsConfig,
            DigitsTask,
            DigitsJob,
            mirrored_strategy,
            lambda config: config.strategy.virtual_cpu_devices,
        ),
        "topics_lm": TaskKind(
            topics_lm.TopicsConfig,
            topics_lm.TopicsTask,
            topics_lm.TopicsJob,
            topics_lm.topics_strategy,
            topics_lm.num_cpu_devices,
            topics_lm.check_entries,
        ),
    }
)


def kind_of(config: JobConfig) -> TaskKind:
    """Return the kind of task of a configuration."""
    return _find_kind("jobs.kind_of", config)


def _find_kind(caller: str, config: Any) -> TaskKind:
    kind = next((k for k in TASKS.values() if isinstance(config, k.schema)), None)
    if kind is None:
        raise ArgumentTypeError(
            f"{caller} was given config={show(config)}.\n\n"
            f"config is one of {', '.join(k.schema.__name__ for k in TASKS.values())}.\n\n"
            "Pass load_job_config(path).values."
        )
    return kind


def make_strategy(config: JobConfig) -> Strategy:
    """Return the strategy of a configuration.

    Example:
        >>> make_strategy(DigitsConfig()).num_replicas_in_sync
        8
    """
    return _find_kind("jobs.make_strategy", config).make_strategy(config)


def load_job_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig[Any]:
    """Read the configuration of a job. Its entry `task` determines its sections.

    Args:
        path: The TOML file. `task = "..."` is before its sections; without it, the task is
            "digits".
        overrides: The values of `--set`.

    Returns:
        The configuration of the task, and the origin of each entry.

    Raises:
        ConfigError: The task does not exist, or as for `load_config`.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp(), "job.toml")
        >>> _ = file.write_text('task = "digits"\\n[data]\\nbatch_size = 32\\n')
        >>> loaded = load_job_config(file)
        >>> loaded.values.task, loaded.values.data.batch_size
        ('digits', 32)
    """
    caller = "jobs.load_job_config"
    source, texts = check_sources(caller, path, overrides)
    with ErrorNote(f"{caller} was given path={source!r} and overrides={texts!r}."):
        kind = TASKS[_read_task_name(source)]
        loaded = load_config(kind.schema, source, texts)
        kind.check(loaded)
    return loaded


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a configuration as a job that can be planned.

    Args:
        path: The TOML file, as for `jaxdist train`.
        overrides: The values of `--set`.

    Returns:
        The job.

    Raises:
        ConfigError: As for `load_config`.

    Example:
        >>> from jaxdist.jobs import load_job
        >>> load_job("configs/digits_mirrored.toml").name
        'digits'
    """
    caller = "jobs.load_job"
    source, texts = check_sources(caller, path, overrides)
    with ErrorNote(f"{caller} was given path={source!r} and overrides={texts!r}."):
        loaded = load_job_config(source, texts)
    return kind_of(loaded.values).make_job(loaded)


def _read_task_name(path: str | Path) -> str:
    # The task selects the schema, so it is read before `load_config` checks all other entries.
    text = read_text(path)
    try:
        name = tomllib.loads(text).get("task", _DEFAULT)
    except tomllib.TOMLDecodeError:
        return _DEFAULT  # load_config reports this error, with its line
    if not isinstance(name, str) or name not in TASKS:
        near = find_nearest(name, list(TASKS)) if isinstance(name, str) else None
        hint = f" Did you mean {near!r}?" if near else ""
        line = find_lines(text).get(("task",), 1)
        raise ConfigError(
            f"{path}, line {line}: there is no task {name!r}.\n\n"
            f"The tasks are {', '.join(map(repr, TASKS))}.{hint}\n\n"
            f'Write for instance task = "{near or _DEFAULT}".'
        )
    return name
