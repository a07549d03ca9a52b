"""The job that a configuration file describes."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.training._config import load_config
from jaxdist.training._config_sources import read_text
from jaxdist.training._digits_job import DigitsJob
from jaxdist.training._job import Job
from jaxdist.training._schema import DigitsConfig

Loader = Callable[[str | Path, Sequence[str]], Job]


def _digits(path: str | Path, overrides: Sequence[str]) -> Job:
    return DigitsJob(load_config(DigitsConfig, path, overrides))


# Whether a document is of a job, and what loads it; the first that says so.
_JOBS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Loader], ...] = (
    (lambda document: True, _digits),
)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a configuration as a job that can be planned.

    Args:
        path: The TOML file, as for `jaxdist train`.
        overrides: What `--set` was given.

    Returns:
        The job.

    Raises:
        ConfigError: As for `load_config`.

    Example:
        >>> from jaxdist.training import load_job
        >>> load_job("configs/digits_mirrored.toml").name
        'digits'
    """
    document: dict[str, Any] = {}
    try:
        document = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError:
        pass  # the loader says where it is wrong
    load = next(load for is_its, load in _JOBS if is_its(document))
    return load(path, overrides)
