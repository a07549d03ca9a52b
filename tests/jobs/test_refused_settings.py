"""Settings that a job cannot use are refused with what was found and the remedy."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxdist.errors import ArgumentError, ArgumentTypeError, ConfigError, JaxdistError
from jaxdist.jobs import DigitsConfig, load_config
from jaxdist.jobs.topics_lm import TopicsConfig, TopicsTask
from tests.strategies.oracle import refused

Row = tuple[Callable[[Any], Any], type[JaxdistError], tuple[str, ...]]


def load_topics(file: pathlib.Path, *overrides: str) -> Any:
    """Check the sizes of a language model."""
    TopicsTask.check(load_config(TopicsConfig, file, overrides))


ROWS: dict[str, Row] = {
    "a schema that is no class of sections": (
        lambda file: load_config({"steps": 3}, file),  # type: ignore[type-var, arg-type]
        ArgumentTypeError,
        ("jobs.load_config was given schema={'steps': 3}", "schema=jobs.DigitsConfig"),
    ),
    "a task of another configuration": (
        lambda file: DigitsConfig(task="topics_lm"),  # type: ignore[arg-type]
        ArgumentError,
        ("jobs.DigitsConfig was given task='topics_lm'", "Leave task out"),
    ),
    "a vocabulary that devices cannot share": (
        lambda file: load_topics(
            file,
            "model.heads=3",
            "model.width=12",
            "model.hidden=12",
            "strategy.logical_devices=3",
            "strategy.partition=tensor_parallel",
        ),
        ConfigError,
        ("strategy.logical_devices is 3", "the vocabulary has 256 entries", "a divisor of 256"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_setting_that_a_job_cannot_use_is_named(name: str, tmp_path: pathlib.Path) -> None:
    call, error, parts = ROWS[name]
    file = tmp_path / "job.toml"
    file.write_text("")
    with refused(error, *parts) as caught:
        call(file)
    assert str(caught.value).count("\n\n") >= 2
