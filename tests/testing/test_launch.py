"""`testing.launch`: a function in new processes, its results, and its first exception."""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import pytest

import jaxdist
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineExceededError,
    JaxdistError,
    LaunchError,
    MissingExtraError,
)
from jaxdist.testing import _launch as module
from jaxdist.testing import launch
from tests.strategies.oracle import refused


def find_index() -> int:
    """The number of the process."""
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def _count_devices() -> tuple[int, int, int]:
    print("in process", find_index())
    return find_index(), jax.local_device_count(), os.getpid()


def test_results_come_in_the_order_of_the_processes(capfd: pytest.CaptureFixture[str]) -> None:
    # By reference: a function of a module. By value: one inside of another.
    scale = 10

    def scaled() -> int:
        return scale * find_index()

    assert launch(scaled, 2) == [0, 10]
    results = launch(_count_devices, 2, devices_per_process=3, timeout_seconds=60)
    assert [result[:2] for result in results] == [(0, 3), (1, 3)]
    assert len({result[2] for result in results} | {os.getpid()}) == 3
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0] in process 0",
        "[1] in process 1",
    ]


class _OwnError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _raise_in_1() -> None:
    if find_index() == 1:
        raise jaxdist.errors.UnavailableError("process 7 has ended.", [7])


def test_an_exception_is_raised_here_with_the_process_and_its_traceback() -> None:
    with pytest.raises(jaxdist.errors.UnavailableError, match="process 7 has ended") as caught:
        launch(_raise_in_1, 2)
    assert caught.value.processes == (7,)
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in process 1:\nTraceback")
    assert "in _raise_in_1" in note


def _raise_own() -> None:
    raise _OwnError(1, 2)


def test_an_exception_that_cannot_be_pickled_is_an_error_with_its_traceback() -> None:
    with refused(LaunchError, "process 0 failed", "_OwnError: 1 and 2", "in _raise_own"):
        launch(_raise_own, 1)


def test_a_process_that_a_signal_ends_is_an_error() -> None:
    with refused(LaunchError, "process 0", "signal SIGKILL"):
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        launch(threading.Lock, 1)


def test_a_process_that_exits_before_the_function_returns_is_an_error() -> None:
    with refused(LaunchError, "process 0 ended with exit code 0", "os._exit"):
        launch(lambda: os._exit(0), 1)


def test_processes_that_take_too_long_are_ended_and_named() -> None:
    with pytest.raises(DeadlineExceededError, match="processes 0, 1 did not return") as caught:
        launch(lambda: time.sleep(100), 2, timeout_seconds=0.3)
    assert caught.value.processes == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"function": 3}, ArgumentTypeError, ["function=3", "launch(train, 2)"]),
        ({"n": 0}, ArgumentError, ["n=0"]),
        ({"n": 2.0}, ArgumentTypeError, ["n=2.0"]),
        ({"n": 10_000}, ArgumentError, ["n=10000", "512"]),
        ({"devices_per_process": 0}, ArgumentError, ["devices_per_process=0"]),
        ({"timeout_seconds": 0}, ArgumentError, ["timeout_seconds=0"]),
        ({"timeout_seconds": -1}, ArgumentError, ["timeout_seconds=-1"]),
        ({"timeout_seconds": "1"}, ArgumentTypeError, ["timeout_seconds='1'"]),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], kind: type[JaxdistError], parts: list[str]
) -> None:
    with refused(kind, "testing.launch", *parts):
        given: dict[str, Any] = {"function": find_index, "n": 1, **arguments}
        launch(**given)


def test_without_cloudpickle_a_function_of_a_notebook_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with refused(MissingExtraError, "cloudpickle is needed", "pip install cloudpickle"):
        launch(lambda: 0, 1)


def test_ctrl_c_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_attempt(*_: Any) -> module.Outcome:
        return module.Outcome((), None, signal.SIGINT, ())

    monkeypatch.setattr(module, "run_attempt", run_attempt)
    with pytest.raises(KeyboardInterrupt):
        launch(find_index, 1)
