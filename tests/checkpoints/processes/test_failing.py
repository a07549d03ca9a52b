"""A save that fails in one of several processes: nothing hangs, and a checkpoint is whole."""

import pathlib

import jax
import pytest

from jaxdist.training import Checkpoints
from tests.checkpoints.processes import saving
from tests.processes.job import results_of_job, run_job

# A process has fewer file operations in one save. The later ones read files for the manifest.
_ALL = (*range(1, 31), *range(31, 200, 6))
_SAMPLE = (1, 7, 24, 26)


def _restore_newest(folder: pathlib.Path) -> int:
    like = {
        "sharded": jax.ShapeDtypeStruct((8, 4), "float32"),
        "replicated": jax.ShapeDtypeStruct((8, 4), "float32"),
        "host": jax.ShapeDtypeStruct((3,), "int64"),
    }
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.restore_latest(like=like)
        assert found is not None
        assert saving.is_whole(found.state, found.step)
        assert found.notes == {"step": found.step}
        # The next job deletes what was written in part.
        checkpoints.save(100, {"w": jax.numpy.ones(2)})
    left = [p.name for p in folder.iterdir() if not p.name.startswith(".jaxdist-job")]
    assert sorted(left) == ["100", "manifests"]
    return found.step


def _kill_at(folder: pathlib.Path, victim: int, k: int) -> tuple[bool, int]:
    """Return whether the victim was killed, and the step that was restored."""
    args = (str(folder), victim, k)
    outcomes = run_job(saving.save_until_killed, 2, args=args, devices=2)
    other = outcomes[1 - victim]
    text = "\n".join(outcome.describe() for outcome in outcomes)
    assert other.exit_code == 0, text
    was_killed = outcomes[victim].exit_code == -9
    if was_killed:
        result = other.result
        # The last file operations come when all is complete.
        if result["error"] is not None:
            assert result["error"] == "UnavailableError", text
            assert result["processes"] == (victim,), text
            first = result["message"].splitlines()[0]
            assert f"process {victim}" in first
            assert f"process {1 - victim}" not in first
            assert result["seconds"] < 15, text
    else:
        assert outcomes[victim].exit_code == 0, text
    return was_killed, _restore_newest(folder)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("k", _SAMPLE)
def test_killed_at_a_file_operation_of_a_save_the_state_restores(
    tmp_path: pathlib.Path, victim: int, k: int
) -> None:
    was_killed, step = _kill_at(tmp_path, victim, k)
    assert step in (1, 2)
    if k == 1:
        assert was_killed
        assert step == 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_each_file_operation_of_a_save_the_state_restores(
    tmp_path: pathlib.Path, victim: int
) -> None:
    steps = []
    for k in _ALL:
        folder = tmp_path / str(k)
        folder.mkdir()
        was_killed, step = _kill_at(folder, victim, k)
        steps.append(step)
        if not was_killed:
            break
    else:
        raise AssertionError(f"a save has {k} file operations or more")
    assert steps[0] == 1
    assert steps[-1] == 2
    # The previous one counts until the new one does.
    assert steps == sorted(steps)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_is_full_for_one_process_fails_the_save_in_all(
    tmp_path: pathlib.Path, victim: int
) -> None:
    args = (str(tmp_path), victim)
    results = results_of_job(saving.save_with_failing_disk, 2, args=args)
    for result in results:
        assert len(result) == 2, result
        assert "Checkpoint 2 cannot be written" in result[0]
        assert "No space left" in result[0]
        assert "The last complete one is of step 1" in result[0]
        assert result[1] == "3"
    assert f"process {victim} failed with OSError" in results[1 - victim][0]


def test_a_folder_that_cannot_be_made_fails_the_save_in_all(tmp_path: pathlib.Path) -> None:
    for error, step in results_of_job(saving.save_where_a_file_is, 2, args=(str(tmp_path),)):
        assert "Checkpoint 2 cannot be written" in error
        assert "process 0 cannot create the folder: NotADirectoryError" in error
        assert step == "3"


def test_folders_that_are_not_shared_are_named_at_the_first_save(tmp_path: pathlib.Path) -> None:
    results = results_of_job(saving.save_into_own_folder, 2, args=(str(tmp_path),))
    for text in results:
        assert text.startswith("Checkpoints.save(step=1): process 1 on ")
        assert str(tmp_path / "0") in text
        assert str(tmp_path / "1") in text
        assert "that all hosts share" in text
    assert not [p for p in tmp_path.glob("*/*") if "jaxdist-shared" in p.name]


def test_folders_with_different_checkpoints_are_named_at_a_restore(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path / "0") as checkpoints:
        checkpoints.save(7, {"w": jax.numpy.ones(2)})
    results = results_of_job(saving.restore_from_own_folder, 2, args=(str(tmp_path),))
    for text in results:
        first = text.splitlines()[0]
        assert "process 1 on" in first
        assert "sees the checkpoints [] in" in first
        assert "[7] in" in first


def test_processes_that_save_different_steps_get_an_error(tmp_path: pathlib.Path) -> None:
    for result in results_of_job(saving.save_other_steps, 2, args=(str(tmp_path),)):
        assert result["error"] == "ProgramMismatchError"
        assert result["processes"] == (1,)
        assert "process 1 saves step 2" in result["text"].splitlines()[0]


@pytest.mark.parametrize("call", ["save", "restore"])
def test_a_process_that_does_not_come_is_named_when_the_time_is_over(
    tmp_path: pathlib.Path, call: str
) -> None:
    first, second = results_of_job(saving.save_without_one, 2, args=(str(tmp_path), call, 2.0))
    assert second["error"] is None
    assert first["error"] == "DeadlineExceededError"
    assert first["processes"] == (1,)
    assert "process 1" in first["first"]
    assert "process 0" not in first["first"]
    assert 2.0 <= first["seconds"] < 12


def test_a_damaged_checkpoint_is_found_by_all_and_moved_once(tmp_path: pathlib.Path) -> None:
    for result in results_of_job(saving.restore_damaged, 2, args=(str(tmp_path),), devices=2):
        assert result["errors"] == ["DamagedCheckpointError"]
        assert result["step"] == 1
        assert result["moved"] == [str(tmp_path / "damaged" / "2")]


def test_processes_that_have_joined_have_one_job_id(tmp_path: pathlib.Path) -> None:
    first, second = results_of_job(saving.job_ids, 2, args=(str(tmp_path),))
    assert first == second


def test_all_processes_refuse_a_lower_step_and_go_back_together(tmp_path: pathlib.Path) -> None:
    results = results_of_job(saving.go_back, 2, args=(str(tmp_path),), devices=2)
    for result in results:
        assert result["refused"].startswith("CheckpointError: Checkpoints.save was given step=1.")
        assert result["refused"] == results[0]["refused"]
        assert tuple(result["kept"]) == (4, 5, 6)
        assert "CheckpointError" in result["denied"]
        assert "Permission denied" in result["denied"]
        assert tuple(result["deleted"]) == (5, 6)
        assert tuple(result["restored"]) == (5, True)
        assert result["mismatch"].startswith(
            "ProgramMismatchError: Checkpoints.discard_after: process 1 deletes the checkpoints "
            "after step 1, and the first process deletes the checkpoints after step 0."
        )


def _kill_in_discard(folder: pathlib.Path, k: int) -> int | None:
    """Return the step that is restored after a kill; None where the process was not killed."""
    outcomes = run_job(saving.discard_until_killed, 2, args=(str(folder), 0, k))
    text = "\n".join(outcome.describe() for outcome in outcomes)
    assert outcomes[1].exit_code == 0, text
    if outcomes[0].exit_code != -9:
        return None
    assert outcomes[1].result.startswith("UnavailableError"), text
    like = {
        "sharded": jax.ShapeDtypeStruct((8, 4), "float32"),
        "replicated": jax.ShapeDtypeStruct((8, 4), "float32"),
        "host": jax.ShapeDtypeStruct((3,), "int64"),
    }
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore_latest(like=like)
        assert found is not None
        assert saving.is_whole(found.state, found.step)
        checkpoints.discard_after(4)
        checkpoints.save(5, {"w": jax.numpy.ones(2)})
    left = [p.name for p in folder.iterdir() if not p.name.startswith(".jaxdist-job")]
    assert sorted(left) == ["4", "5", "manifests"]
    return found.step


def test_killed_in_the_middle_of_a_discard_the_state_restores(tmp_path: pathlib.Path) -> None:
    # The rename of checkpoint 6, and its first deleted file.
    assert _kill_in_discard(tmp_path, 2) in (5, 6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_at_each_deletion_of_a_discard_the_state_restores(tmp_path: pathlib.Path) -> None:
    steps: list[int] = []
    for k in range(1, 300):
        folder = tmp_path / str(k)
        folder.mkdir()
        step = _kill_in_discard(folder, k)
        if step is None:
            break
        steps.append(step)
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {6, 5, 4}
