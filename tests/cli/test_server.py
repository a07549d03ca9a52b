"""`jaxdist server` and the tasks of `jaxdist train` that are servers and workers."""

import inspect
from typing import Any

import pytest

import jaxdist
from jaxdist.cli import _server


def test_a_task_of_train_has_the_options_of_a_server_that_was_given_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []

    class Made:
        def __init__(self, cluster: Any, job: str, index: int, **options: Any) -> None:
            made.append({"task": f"{job}:{index}", **options})

        def join(self) -> None:
            made.append({"joined": True})

        def stop(self) -> None:
            made.append({"stopped": True})

    monkeypatch.setattr(_server, "Server", Made)
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    assert _server.run_server(_server.make_server_arguments()) == 0
    defaults = inspect.signature(jaxdist.Server).parameters
    options = {k: v for k, v in made[0].items() if k != "task"}
    assert made[0]["task"] == "worker:0"
    assert {"announce", "snapshot_directory", "snapshot_seconds", "modules"} == set(options)
    for name, value in options.items():
        assert value == defaults[name].default or not (value or defaults[name].default)
    assert made[1:] == [{"joined": True}, {"stopped": True}]
