"""What the processes of a job say to each other about a checkpoint, with threads as processes."""

import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import optax
import pytest

import jaxdist
from jaxdist._checkpoints import local_storage, parts
from jaxdist._checkpoints.errors import ElsewhereError
from jaxdist._checkpoints.group import Group, agree_on_result, check_same_folder, check_same_steps
from jaxdist._checkpoints.joint_save import JointSave
from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist._checkpoints.survivors import NoCopyError, Snapshots
from jaxdist._processes import HERE, Agreement, LocalStore, Process
from jaxdist.errors import (
    ArgumentError,
    CheckpointError,
    DamagedCheckpointError,
    DeadlineExceededError,
    ProgramMismatchError,
    UnavailableError,
)
from jaxdist.training import Checkpoints


def _run(act: Callable[[Group], Any], seconds: float = 20.0) -> list[Any]:
    """Run a function as two processes, and return their results or errors."""
    store = LocalStore()

    def run(index: int) -> Any:
        try:
            return act(Group(Agreement(store, Process(index, 2)), seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_all_get_what_each_says() -> None:
    found = _run(lambda g: g.gather("Checkpoints.save", {"index": g.process.index}))
    assert found == [[{"index": 0}, {"index": 1}]] * 2


def test_a_process_that_does_not_come_is_named() -> None:
    error = _run(lambda g: None if g.process.index else g.gather("Checkpoints.save", 1), 0.2)[0]
    assert isinstance(error, DeadlineExceededError)
    assert error.processes == (1,)
    assert "process 1 did not take part in the exchange of Checkpoints.save" in str(error)


def test_the_background_stops_when_the_main_thread_has_an_error_of_another_process() -> None:
    def act(group: Group) -> Any:
        if group.process.index:
            return None
        HERE.blame([1])
        return group.gather_in_background("channel", "Checkpoints.save(step=3)", "")

    try:
        error = _run(act)[0]
    finally:
        HERE.blames = None
    assert isinstance(error, UnavailableError)
    assert error.processes == (1,)
    assert str(error).startswith("Checkpoints.save(step=3): process 1 did not answer")


@pytest.mark.parametrize("kind", [DamagedCheckpointError, CheckpointError])
def test_an_error_in_one_process_is_an_error_in_all(kind: type[Exception]) -> None:
    def act(group: Group) -> Any:
        def fail() -> int:
            if group.process.index:
                raise kind("the reason")
            return 3

        return agree_on_result(group, "restore(step=3)", fail)

    here, there = _run(act)
    assert type(here) is type(there) is kind
    assert str(there) == "the reason"
    assert "process 1 has failed" in str(here)
    assert "the reason" in str(here)
    assert _run(lambda g: agree_on_result(g, "restore", lambda: g.process.index)) == [0, 1]


def test_folders_with_other_checkpoints_are_an_error(tmp_path: pathlib.Path) -> None:
    steps = {0: (3,), 1: (3, 4)}
    for error in _run(lambda g: check_same_steps(g, "restore", tmp_path, steps[g.process.index])):
        assert isinstance(error, CheckpointError)
        assert "process 1" in str(error)
        assert "[3, 4]" in str(error)
    assert _run(lambda g: check_same_steps(g, "restore", tmp_path, (3,))) == [None, None]


def test_folders_that_are_not_shared_are_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxdist._checkpoints.group._PATIENCE_SECONDS", 0.1)
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    for error in _run(lambda g: check_same_folder(g, "save", folders[g.process.index])):
        assert isinstance(error, CheckpointError)
        assert str(folders[0]) in str(error)
        assert str(folders[1]) in str(error)
    assert list(tmp_path.glob("*/*")) == []
    first, second = _run(lambda g: check_same_folder(g, "save", tmp_path))
    assert first == second
    for error in _run(lambda g: check_same_folder(g, "save", tmp_path / "missing")):
        assert isinstance(error, CheckpointError)
        assert "process 0 cannot write to" in str(error)


def test_other_steps_and_a_folder_that_cannot_be_made_are_errors(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(group: Group) -> Any:
        save = JointSave(group, LocalStorage(tmp_path), 3)
        try:
            save.agree_on_steps("save", 1 + group.process.index)
        except ProgramMismatchError as error:
            # The processes have lost each other: the next save raises the same error.
            with pytest.raises(ProgramMismatchError):
                save.agree_on_steps("save", 5)
            return error

    for error in _run(act):
        assert isinstance(error, ProgramMismatchError)
        assert error.processes == (1,)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "prepare", fail)
    storage = LocalStorage(tmp_path)
    for error in _run(lambda g: JointSave(g, storage, 3).start(1, {"w": np.ones(2)}, {})):
        assert isinstance(error, ElsewhereError)
        assert "No space left" in str(error)


def test_a_part_that_one_process_cannot_write_fails_in_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*given: Any) -> Any:
        process: Process = given[4]
        if process.index:
            raise OSError(28, "No space left on device")
        return lambda: None

    monkeypatch.setattr("jaxdist._checkpoints.joint_save.start_part", start)

    def act(group: Group) -> Any:
        save = JointSave(group, LocalStorage(tmp_path), 3)
        save.start(1, {"w": np.ones(2)}, {})
        assert (save.error is not None) == bool(group.process.index)
        save.complete(1)

    here, there = _run(act)
    assert isinstance(here, ElsewhereError)
    assert str(here) == "process 1 failed with OSError: [Errno 28] No space left on device"
    assert isinstance(there, OSError)


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_time_limit_is_above_zero(tmp_path: pathlib.Path, seconds: float) -> None:
    with pytest.raises(ArgumentError, match=r"timeout_seconds="):
        Checkpoints(tmp_path, timeout_seconds=seconds)


def test_on_failure_is_removed_by_none_and_by_close(tmp_path: pathlib.Path) -> None:
    from jaxdist._checkpoints import survivors

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.on_failure(lambda: (1, {}))
        checkpoints.on_failure(lambda: (2, {}))
        assert len(survivors._active) == 1
        checkpoints.on_failure(None)
        assert survivors._active == []
        checkpoints.on_failure(lambda: (1, {}))
    assert survivors._active == []


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    made = Snapshots(lambda: (0, {"w": np.ones(2)}))
    made._last = 0
    with pytest.raises(NoCopyError, match="no step has begun"):
        made.find_newest()


def test_a_state_without_a_full_copy_is_refused() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    how, sync = jaxdist.VariableAggregation.SUM, jaxdist.VariableSynchronization.ON_READ
    with strategy.scope():
        total = jaxdist.Variable(np.zeros(3), synchronization=sync, aggregation=how)
        pieces = jaxdist.sharded_update(optax.adam(1e-2), min_bytes=0).init({"w": np.ones(8)})
    for state, text in ((total, "ON_READ"), (pieces, "in pieces")):
        made = Snapshots(lambda state=state: (1, state))
        with pytest.raises(NoCopyError, match=text):
            made.find_newest()


def test_a_checkpoint_with_a_leaf_that_orbax_has_not_written_does_not_count(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    name = storage.prepare(3, "mark")
    parts.start_part(storage, name, {"w": np.ones(2)}, {}, Process(0, 1), 0)()
    monkeypatch.setattr(local_storage, "list_stored_names", lambda _: set())
    with pytest.raises(OSError, match="has not written 1 leaves, such as w"):
        storage.publish(name, 3, 1, 0)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == ()
