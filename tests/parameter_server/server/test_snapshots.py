"""Snapshots: complete or absent, of one moment, and refused when they are not what was written."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Hello,
    Read,
    Saved,
    WriteSnapshot,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import (
    CheckpointError,
    ContextError,
    DamagedCheckpointError,
    ShapeError,
)


def _start(folder: pathlib.Path, task: str = "ps:0", **options: Any) -> VariableServer:
    options = {"snapshot_seconds": 1e6, **options}
    return VariableServer(task, snapshot_directory=folder, **options)


def _make(folder: pathlib.Path) -> VariableServer:
    server = _start(folder)
    server.call(Create([Creation("w", np.zeros(3))], "first"))
    server.call(ChangeVariables([Change("add", "w", [np.ones(3)])], client="c", closure=1))
    return server


def _describe(server: VariableServer) -> Any:
    return server.call(GetStatistics()).snapshots


def _read_start(server: VariableServer) -> Any:
    return server.call(Hello()).snapshot


def _files(folder: pathlib.Path, step: int) -> list[pathlib.Path]:
    return sorted(p for p in (folder / "ps_0" / str(step)).rglob("*") if p.is_file())


def test_values_of_each_dtype_and_name_come_back(tmp_path: pathlib.Path) -> None:
    dtypes = ["bool", "int8", "int64", "float64", "complex64", ml_dtypes.bfloat16]
    values = {f"v.{n}/a b\u00e9[0]": np.ones((2, n), d) for n, d in enumerate(dtypes)}
    values |= {"scalar": np.array(7), "v": np.zeros((0, 3), np.float32)}
    server = _start(tmp_path)
    server.call(Create([Creation(name, value) for name, value in values.items()], "somebody"))
    server.close()
    found = _start(tmp_path).call(Read(list(values))).values
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_a_server_says_from_which_snapshot_and_versions_it_serves(tmp_path: pathlib.Path) -> None:
    assert _start(tmp_path, "ps:1").call(Hello()).snapshot is None
    server = _make(tmp_path)
    assert server.call(WriteSnapshot()) == Saved(0, 1)
    assert _describe(server)["saved"] == {"step": 0, "applied": 1}
    kept = _start(tmp_path)
    said = kept.call(Hello())
    assert said.snapshot == {"step": 0, "folder": str(tmp_path / "ps_0"), "applied": 1}
    assert (said.versions, said.applied) == ({"w": 1}, 1)
    assert kept.incarnation != server.incarnation


def test_the_staleness_of_each_client_comes_back(tmp_path: pathlib.Path) -> None:
    server = _start(tmp_path)
    server.call(Create([Creation("w", np.zeros(3))]))
    for closure in range(3):
        client = "a" if closure < 2 else "b"
        server.call(
            ChangeVariables([Change("add", "w", [np.ones(3)], 0)], client=client, closure=closure)
        )
    server.close()
    found = _start(tmp_path).call(GetStatistics())
    assert found.staleness_of == {"a": {0: 1, 1: 1}, "b": {2: 1}}
    assert found.staleness == {0: 1, 1: 1, 2: 1}


def test_the_newest_two_are_kept(tmp_path: pathlib.Path) -> None:
    server = _make(tmp_path)
    for n in range(4):
        assert server.call(WriteSnapshot()).step == n
    assert sorted(p.name for p in (tmp_path / "ps_0").iterdir() if p.name.isdigit()) == ["2", "3"]


def test_changes_of_rows_after_a_restart_and_after_a_snapshot(tmp_path: pathlib.Path) -> None:
    server = _start(tmp_path)
    server.call(Create([Creation("t", np.zeros((4, 2), np.float32))]))
    change = [Change("scatter_add", "t", [np.array([1]), np.ones((1, 2), np.float32)])]
    for n in range(3):
        server.call(ChangeVariables(change))
        server.call(WriteSnapshot())
        kept = _start(tmp_path)
        reply = kept.call(ChangeVariables(change, read=["t"]))
        assert reply.values["t"][1].tolist() == [n + 2.0, n + 2.0]
        assert reply.versions == {"t": n + 2}


def test_snapshots_are_written_by_themselves_when_something_changed(
    tmp_path: pathlib.Path,
) -> None:
    server = _start(tmp_path, snapshot_seconds=0.05)
    server.call(Create([Creation("w", np.zeros(3))]))

    def saved() -> dict[str, Any]:
        found: dict[str, Any] = _describe(server)["saved"]
        return found

    for n in range(2):
        server.call(ChangeVariables([Change("add", "w", [np.ones(3)])]))
        deadline = time.monotonic() + 30
        while saved().get("applied") != n + 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    server.close()
    step = saved()["step"]
    kept = _start(tmp_path, snapshot_seconds=0.01)
    kept.close()
    assert _describe(kept)["saved"] == {}
    assert _read_start(_start(tmp_path))["step"] == step


def test_a_snapshot_that_cannot_be_written_is_an_error_and_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = _start(tmp_path, snapshot_seconds=0.02)

    def fail(*_: Any) -> None:
        raise CheckpointError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(server._keeper._checkpoints, "save", fail)  # type: ignore[union-attr]
        server.call(Create([Creation("w", np.zeros(3))]))
        with pytest.raises(CheckpointError, match="planted"):
            server.call(WriteSnapshot())
        deadline = time.monotonic() + 30
        while "A snapshot of ps:0 could not be written: planted" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert _describe(server)["failure"] == "planted"
    server.close()
    assert _describe(server)["failure"] is None
    assert _start(tmp_path).call(Hello()).versions == {"w": 0}


def test_without_a_folder_a_snapshot_is_an_error() -> None:
    server = VariableServer()
    with pytest.raises(ContextError, match="no snapshot_directory"):
        server.call(WriteSnapshot())
    server.close()


def test_a_snapshot_of_another_task_is_an_error_that_names_it(tmp_path: pathlib.Path) -> None:
    _make(tmp_path).close()
    (tmp_path / "ps_0").rename(tmp_path / "ps_1")
    with pytest.raises(CheckpointError, match="snapshot of other variables: of task 'ps:0'"):
        _start(tmp_path, "ps:1")


def test_a_variable_of_another_shape_than_in_the_snapshot_is_an_error_that_names_it(
    tmp_path: pathlib.Path,
) -> None:
    _make(tmp_path).close()
    server = _start(tmp_path)
    with pytest.raises(ShapeError, match=r"created by client 'first' and restored from .*ps_0"):
        server.call(Create([Creation("w", np.zeros(4))]))
    assert server.call(Create([Creation("w", np.zeros(3))])).made == {"w": (False, 1)}


def test_each_damaged_file_is_an_error_that_names_it(tmp_path: pathlib.Path) -> None:
    server = _make(tmp_path)
    server.call(WriteSnapshot())
    for n, file in enumerate(_files(tmp_path, 0)):
        content = file.read_bytes()
        if not content:
            continue
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
        with pytest.raises(DamagedCheckpointError, match="ps_0/0 is damaged") as caught:
            _start(tmp_path)
        assert str(file) in str(caught.value), n
        file.write_bytes(content)
    assert _start(tmp_path).call(Hello()).versions == {"w": 1}


def test_damaged_notes_are_found_without_a_manifest(tmp_path: pathlib.Path) -> None:
    server = _make(tmp_path)
    server.call(WriteSnapshot())
    server.call(WriteSnapshot())
    (tmp_path / "ps_0" / "manifests" / "1.json").unlink()
    notes = tmp_path / "ps_0" / "1" / "notes" / "metadata"
    good = notes.read_bytes()
    for content in (b"", b"[]", b"{}", good[:-9], json.dumps({"variables": [3]}).encode()):
        notes.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match="serve from the one before, 0"):
            _start(tmp_path)
    # Another number of a closure is found by the checksum of the notes.
    notes.write_bytes(good.replace(b'"counted": [1]', b'"counted": [2]'))
    assert notes.read_bytes() != good
    with pytest.raises(DamagedCheckpointError):
        _start(tmp_path)


def test_a_snapshot_holds_each_request_as_a_whole(tmp_path: pathlib.Path) -> None:
    server = _start(tmp_path)
    server.call(Create([Creation("w", np.zeros(1000)), Creation("t", np.zeros((50, 4)))]))
    is_done = threading.Event()
    ids = np.arange(50)

    def change() -> None:
        n = 0
        while not is_done.is_set():
            n += 1
            changes = [
                Change("add", "w", [np.ones(1000)]),
                Change("scatter_add", "t", [ids, np.ones((50, 4))]),
            ]
            server.call(ChangeVariables(changes, client="c", closure=n))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(4):
            server.call(WriteSnapshot())
            kept = _start(tmp_path)
            found = kept.call(Read(["w", "t"]))
            applied = kept.call(Hello()).applied
            assert set(found.values["w"]) | set(found.values["t"].ravel()) == {applied}
            assert found.versions == {"w": applied, "t": applied}
            # The first snapshot may be of a server that has counted nothing yet.
            counted = kept._state.counted.to_json().get("c", {"counted": []})["counted"]
            assert counted == list(range(1, applied + 1))
    finally:
        is_done.set()
        thread.join()


_PROCESS = """
import sys, time
import numpy as np
from jaxdist._parameter_server import protocol as p
from jaxdist._parameter_server.server import VariableServer
server = VariableServer(snapshot_directory=sys.argv[1], snapshot_seconds=float(sys.argv[2]))
server.call(p.Create([p.Creation("w", np.zeros(1000))]))
version, applied = server.call(p.Read(["w"])).versions["w"], server.call(p.Hello()).applied
print("versions", version, applied, flush=True)
n = 0
while True:
    n += 1
    changes = [p.Change("add", "w", [np.ones(1000)])]
    server.call(p.ChangeVariables(changes, client=server.incarnation, closure=n))
    print(n, flush=True)
    time.sleep(0.001)
"""


def test_a_server_that_is_killed_at_any_time_serves_from_a_complete_snapshot(
    tmp_path: pathlib.Path,
) -> None:
    before = 0
    for n in range(4):
        command = [sys.executable, "-c", _PROCESS, str(tmp_path), "0.01"]
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        try:
            assert process.stdout is not None
            word, version, applied = process.stdout.readline().split()
            print(f"serving after {time.monotonic() - began:.1f} s")
            assert (word, version) == ("versions", applied)
            assert int(version) >= before
            before = int(version)
            steps = max([-1, *(int(p.stem) for p in tmp_path.glob("ps_0/manifests/*.json"))])
            # At least one snapshot of this process, and then some more requests.
            while not list((tmp_path / "ps_0" / "manifests").glob(f"{steps + 1}.json")):
                assert process.stdout.readline()
            for _ in range(1 + 17 * n):
                process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        kept = _start(tmp_path)
        assert set(kept.call(Read(["w"])).values["w"]) == {kept.call(Hello()).applied}
        kept.close()
    assert before > 0


def test_a_second_server_of_one_folder_is_an_error(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", _PROCESS, str(tmp_path), "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError, match="Another job uses"):
            _start(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    _start(tmp_path)
