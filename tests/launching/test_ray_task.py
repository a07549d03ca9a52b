"""A task whose actor Ray starts again, with a Ray that does what each test says."""

import os
import pathlib
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from jaxdist._launching.child import End
from jaxdist._launching.cluster import ClusterJob
from jaxdist._launching.on_ray.actor import ProcessOnNode
from jaxdist._launching.on_ray.placement import Places
from jaxdist._launching.on_ray.task import OnRay, RayTask, run_tasks_on_ray
from jaxdist._launching.signals import Signals
from jaxdist.errors import LaunchError
from tests.launching.launcher import wait_until
from tests.strategies.oracle import refused


class _ActorError(Exception):
    """An actor that is lost."""


class _UnavailableError(_ActorError):
    """An actor that is being started again."""


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any, **options: Any) -> Any:
        """Return what `get` calls."""
        return lambda: self._call(*args, **options)


class _Actor:
    """Notes what it is told."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.told: list[tuple[str, Any, Any]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> _Method:
        def call(*args: Any, **options: Any) -> Any:
            self.told.append((name, args, options))
            return self._answers[name](*args, **options) if name in self._answers else None

        return _Method(call)


class _Ray:
    """The part of Ray that a task uses; each address is asked of the next actor."""

    exceptions = types.SimpleNamespace(
        RayActorError=_ActorError, ActorUnavailableError=_UnavailableError, RayError=_ActorError
    )

    def __init__(self, *actors: Any, is_ready: bool = True) -> None:
        self._actors, self._is_ready = list(actors), is_ready

    def get_actor(self, name: str) -> Any:
        return self._actors.pop(0) if len(self._actors) > 1 else self._actors[0]

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(0.001)
        return (answers, []) if self._is_ready else ([], answers)

    def get(self, answer: Callable[[], Any], timeout: float | None = None) -> Any:
        return answer()


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def _run(ray: _Ray, places: Places, starts: int = 2, only: str | None = None) -> tuple[End, str]:
    """Run a task to its end; return what it has written, too."""
    lines: list[bytes] = []
    task = OnRay("ps 0", 0, "actor", ["script.py"], {}, has_gpus=False, only_host=only)
    actor = ray.get_actor("actor") if starts == 1 else None
    child = RayTask(ray, task, starts, actor, places, (lines.append, lines.append))
    return _wait(child), b"".join(lines).decode()


def _wait(child: RayTask) -> End:
    wait_until(lambda: child.collect() is not None)
    assert child.end is not None
    return child.end


def _make_places(*watchers: Any) -> Places:
    return Places({"ps 0": "1.1.1.1:10", "worker 0": "1.1.1.2:20"}, watchers)


def test_a_task_that_has_moved_is_told_to_all_before_it_starts() -> None:
    done = {"read": lambda: (b"out\n", b"", End(0, 0))}
    busy = _Actor(find_address=_raise(_UnavailableError()))
    moved = _Actor(find_address=lambda wanted, taken: "1.1.1.3:30", **done)
    watcher = _Actor()
    told: list[Any] = []
    # What a watcher is told runs at once here.
    watcher.__dict__["learn"] = types.SimpleNamespace(remote=lambda *args: told.append(args))
    places = _make_places(watcher)
    end, out = _run(_Ray(busy, moved), places)
    assert (end.code, out) == (0, "out\n")
    assert told == [(2, {"1.1.1.1:10": "1.1.1.3:30", "1.1.1.2:20": "1.1.1.2:20"})]
    asked, started = moved.told[0], moved.told[1]
    assert asked == ("find_address", ("1.1.1.1:10", ["1.1.1.1:10", "1.1.1.2:20"]), {})
    assert started[0] == "start"
    assert started[2]["addresses"] == told[0]
    assert started[1][2] == {"JAXDIST_ATTEMPT": "2"}


def test_a_lost_actor_ends_its_process_and_another_error_is_told() -> None:
    lost, out = _run(_Ray(_Actor(read=_raise(_ActorError()))), _make_places(), starts=1)
    assert (lost.code, lost.describe(), out) == (-9, "the end of its Ray actor", "")
    failed, out = _run(_Ray(_Actor(read=_raise(LaunchError("no python")))), _make_places(), 1)
    assert (failed.code, out) == (1, "[ps 0] no python\n")


def test_an_actor_that_does_not_come_back_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    monkeypatch.setattr("jaxdist._launching.on_ray.task.SECONDS_UNTIL_NEWS", 0.1)
    end, out = _run(_Ray(_Actor(), is_ready=False), _make_places())
    assert end.code == 1
    assert "Ray has not started ps 0 again within 1 s" in out
    assert "waiting until Ray has started ps 0 again" in capsys.readouterr().err


def test_a_server_without_shared_snapshots_stays_on_its_node() -> None:
    actor = _Actor(find_address=lambda wanted, taken: "1.1.1.3:30")
    end, out = _run(_Ray(actor), _make_places(), only="1.1.1.1")
    assert end.code == 1
    assert "ps 0 is at 1.1.1.3:30, on another node than the launcher (1.1.1.1)" in out
    assert "--snapshot-directory" in out


@pytest.mark.parametrize("how", ["signal", "ask_to_end", "kill"])
def test_a_task_that_is_to_end_while_its_actor_is_away_does_not_begin(how: str) -> None:
    away = _Actor(find_address=_raise(_UnavailableError()))
    task = OnRay("ps 0", 0, "actor", [], {}, has_gpus=False)
    child = RayTask(_Ray(away), task, 2, away, _make_places(), (print, print))
    getattr(child, how)(*([2] if how == "signal" else []))
    assert _wait(child).was_ended
    assert "start" not in [name for name, _, _ in away.told]


def test_a_task_that_is_killed_while_it_is_started_is_killed_afterwards() -> None:
    starting, may_go = threading.Event(), threading.Event()

    def start(*args: Any, **options: Any) -> None:
        starting.set()
        assert may_go.wait(20)

    killed: list[int] = []
    actor = _Actor(start=start, read=lambda: (b"", b"", End(0, -9, was_ended=True)))
    actor.__dict__["kill"] = types.SimpleNamespace(remote=lambda: killed.append(1))
    task = OnRay("ps 0", 0, "actor", [], {}, has_gpus=False)
    child = RayTask(_Ray(actor), task, 1, actor, _make_places(), (print, print))
    assert starting.wait(20)
    child.kill()
    may_go.set()
    assert _wait(child).code == -9
    assert len(killed) == 2


def test_servers_on_another_node_need_a_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = _Ray(_Actor())
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "1.1.1.9")
    tasks = "jaxdist._launching.on_ray.task."
    found = ["1.1.1.1:10", "1.1.1.2:20", "1.1.1.9:30"]
    monkeypatch.setattr(tasks + "start_actors", lambda *args: ([_Actor()] * 3, found))
    job = ClusterJob(["python", "a.py"], ["python", "a.py"], 1, 1)
    with refused(LaunchError, "--snapshot-directory", "ps 0 is at 1.1.1.1:10", "(1.1.1.9)"):
        run_tasks_on_ray(ray, job, 0, (print, print), Signals(0))


def test_an_actor_gives_the_same_address_again_unless_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    util: Any = types.ModuleType("ray.util")
    util.get_node_ip_address = lambda: "127.0.0.1"
    monkeypatch.setitem(sys.modules, "ray.util", util)
    actor = ProcessOnNode()
    first = actor.find_address()
    assert actor.find_address(first, [first]) == first
    assert actor.find_address("10.0.0.1:5", []) != "10.0.0.1:5"
    with socket.socket() as used:
        used.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        used.listen()
        assert actor.find_address(first, [first]) != first


def test_an_actor_runs_one_process_after_another_and_keeps_the_newest_addresses(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\nprint(pathlib.Path(os.environ['JAXDIST_ADDRESSES']).read_text())\n"
    )
    actor = ProcessOnNode()
    actor.learn(3, {"a:1": "c:3"})
    for name in ("ps 0", "ps 0"):
        addresses = (2, {"a:1": "b:2"})
        actor.start(
            0, [str(script)], dict(os.environ), ".", has_gpus=False, name=name, addresses=addresses
        )
        out, end = b"", None
        while end is None:
            more, _, end = actor.read()
            out += more
        assert (out, end.code) == (b'[ps 0] {"a:1": "c:3"}\n', 0)


def test_a_node_whose_python_has_gone_is_an_error_of_the_actor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    actor = ProcessOnNode()
    actor.start(0, ["train.py"], dict(os.environ), os.getcwd(), has_gpus=False)
    with refused(LaunchError, "could not start process 0", str(tmp_path / "python")):
        while actor.read()[2] is None:
            pass
