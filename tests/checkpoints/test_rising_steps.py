"""Each checkpoint is above those before it, and `discard_after` goes back; a list is the oracle."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.errors import CheckpointError
from jaxdist.training import Checkpoints
from tests.checkpoints.test_background import Gate
from tests.strategies.oracle import refused
from tests.tables import examples


def _save(checkpoints: Checkpoints, step: int, value: float | None = None) -> None:
    checkpoints.save(step, {"w": jnp.full(3, float(step if value is None else value))})


def _restore(checkpoints: Checkpoints, step: int | None = None) -> tuple[int, float] | None:
    found = checkpoints.restore({"w": jnp.zeros(3)}, step=step)
    return None if found is None else (found.step, float(found.state["w"][0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints 4, 5 and 6."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in 4, 5, 6:
            _save(checkpoints, step)
    return tmp_path


_CALLS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "save", "discard", "open"]), st.integers(0, 9)),
    min_size=3,
    max_size=9,
)


@settings(max_examples=examples(15, 300), deadline=None)
@given(calls=_CALLS, keep=st.integers(1, 3))
def test_any_sequence_of_saves_and_discards_leaves_what_a_list_has(
    calls: list[tuple[str, int]], keep: int
) -> None:
    kept: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, keep=keep)
        for i, (call, step) in enumerate(calls):
            if call == "open":
                checkpoints.close()
                checkpoints = Checkpoints(folder, keep=keep)
            elif call == "discard":
                later = tuple(s for s, _ in kept if s > step)
                assert checkpoints.discard_after(step) == later
                kept = [one for one in kept if one[0] <= step]
            elif kept and step <= kept[-1][0]:
                with pytest.raises(CheckpointError, match=f"is of step {kept[-1][0]}\\."):
                    _save(checkpoints, step, i)
            else:
                _save(checkpoints, step, i)
                kept = [*kept, (step, float(i))][-keep:]
        # Of the last save, the files may be in the background until now.
        assert checkpoints.steps() == tuple(s for s, _ in kept)
        assert _restore(checkpoints) == (kept[-1] if kept else None)
        for one in kept:
            assert _restore(checkpoints, one[0]) == one
        checkpoints.close()


@pytest.mark.parametrize(
    ("step", "found", "later"),
    [
        (1, "step=1. The newest", "the checkpoints 4, 5 and 6"),
        (5, "step=5, and ", "the checkpoints 5 and 6"),
        (6, "step=6, and ", "checkpoint 6"),
    ],
)
def test_a_step_that_is_not_above_the_newest_is_refused_and_the_remedy_works(
    folder: Path, step: int, found: str, later: str
) -> None:
    with Checkpoints(folder, keep=3) as checkpoints:
        remedy = f"discard_after({step - 1}) of training.Checkpoints before: it deletes {later}."
        parts = f"Checkpoints.save was given {found}", "is of step 6.", "from step 7 on", remedy
        with refused(CheckpointError, *parts):
            _save(checkpoints, step)
        assert checkpoints.steps() == (4, 5, 6)
        assert _restore(checkpoints) == (6, 6.0)
        checkpoints.discard_after(step - 1)
        _save(checkpoints, step, -1)
        assert _restore(checkpoints) == (step, -1.0)


def test_a_long_list_of_later_checkpoints_is_shortened(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(9):
            (tmp_path / str(step)).mkdir()
        with refused(CheckpointError, "the 8 checkpoints from 1 to 8"):
            _save(checkpoints, 1)


def test_a_newer_checkpoint_that_is_being_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with Checkpoints(tmp_path) as checkpoints:
        _save(checkpoints, 4)
        assert checkpoints.is_saving_in_progress()
        gate.open()
        with refused(CheckpointError, "is of step 4."):
            _save(checkpoints, 3)
        _save(checkpoints, 5)
        assert checkpoints.discard_after(4) == (5,)
        assert checkpoints.steps() == (4,)


def test_what_was_discarded_is_logged_and_no_file_of_it_is_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpoints(folder) as checkpoints, caplog.at_level(logging.INFO, "jaxdist"):
        assert checkpoints.discard_after(6) == ()
        assert caplog.messages == []
        assert checkpoints.discard_after(4) == (5, 6)
        assert caplog.messages == [f"Deleted the checkpoints 5 and 6 in {folder}."]
        _save(checkpoints, 5, 50)
        assert _restore(checkpoints) == (5, 50.0)
        assert checkpoints.discard_after(-1) == (4, 5)
        assert _restore(checkpoints) is None
        _save(checkpoints, 0)
    assert sorted(p.name for p in folder.iterdir() if p.name[0] != ".") == ["0", "manifests"]
    assert [p.name for p in (folder / "manifests").iterdir()] == ["0.json"]


def test_a_checkpoint_that_cannot_be_deleted_is_an_error_and_the_others_restore(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with Checkpoints(folder) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            with refused(CheckpointError, str(folder), "Permission denied"):
                checkpoints.discard_after(4)
        assert checkpoints.steps() == (4, 5, 6)
        assert checkpoints.discard_after(4) == (5, 6)


class _KilledError(BaseException):
    pass


def _operations(monkeypatch: pytest.MonkeyPatch, last: int) -> Iterator[int]:
    """Let the operation number `last` on files end the call, half done where it has parts."""
    seen = 0
    rename, remove = Path.rename, shutil.rmtree

    def count(before_it: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            before_it()
            raise _KilledError

    def rename_or_end(path: Path, target: Path) -> Path:
        count(lambda: None)
        return rename(path, target)

    def remove_or_end(path: Path) -> None:
        count(lambda: next(p for p in path.rglob("*") if p.is_file()).unlink())
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_end)
        patch.setattr("jaxdist._checkpoints.local_storage.shutil.rmtree", remove_or_end)
        yield seen


# Of each of the two checkpoints, the name is taken away and then its files.
@pytest.mark.parametrize(("last", "left"), [(1, 6), (2, 5), (3, 5), (4, 4), (5, 4)])
def test_a_discard_that_ends_at_any_deletion_leaves_a_folder_that_restores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: int, left: int
) -> None:
    with Checkpoints(folder, keep=3) as checkpoints:
        for _ in _operations(monkeypatch, last):
            if last < 5:
                with pytest.raises(_KilledError):
                    checkpoints.discard_after(4)
            else:
                assert checkpoints.discard_after(4) == (5, 6)
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.steps() == tuple(range(4, left + 1))
        assert _restore(checkpoints) == (left, float(left))
        # Repeat the steps, on what the first attempt has left.
        assert checkpoints.discard_after(4) == tuple(range(5, left + 1))
        for step in 5, 6:
            _save(checkpoints, step, step * 10)
        assert checkpoints.discard_after(5) == (6,)
        assert _restore(checkpoints) == (5, 50.0)
    names = sorted(p.name for p in folder.iterdir() if p.name[0] != ".")
    assert names == ["4", "5", "manifests"]
