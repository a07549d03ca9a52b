"""A reader beside a job that deletes old checkpoints: it sees whole checkpoints only."""

import contextlib
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._checkpoints import list_steps
from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist.errors import CheckpointError, DamagedCheckpointError
from jaxdist.training import Checkpoints

_EVENTS = frozenset({"open", "os.listdir", "os.scandir"})


class _Points:
    """Calls a function at the `k`-th time that Python opens or lists something in a folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.left = 0
        self.do: Callable[[], None] = lambda: None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None or event not in _EVENTS or not args:
            return
        with contextlib.suppress(TypeError, ValueError):
            if os.fsdecode(args[0]).startswith(self.folder):
                self.left -= 1
                if self.left == 0:
                    self.folder = None
                    self.do()

    @contextlib.contextmanager
    def at(self, k: int, folder: pathlib.Path, do: Callable[[], None]) -> Iterator[None]:
        self.folder, self.left, self.do = str(folder), k, do
        try:
            yield
        finally:
            self.folder = None

    @property
    def has_fired(self) -> bool:
        """Whether the point was reached."""
        return self.left <= 0


# A hook cannot be removed. This one does nothing outside of `at`.
POINTS = _Points()
sys.addaudithook(POINTS)


def _make_state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((64, 3), step, "float32"), "n": jnp.int32(step)}


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    with Checkpoints(tmp_path / "saved", keep=9) as checkpoints:
        for step in 1, 2, 3:
            checkpoints.save(step, _make_state(step), {"step": step})
    return tmp_path / "saved"


def _read(folder: pathlib.Path, step: int | None) -> int:
    """Return the step that was read, after comparing all of its values."""
    with Checkpoints(folder) as reader:
        found = reader.restore(_make_state(0), step=step)
    assert found is not None
    assert found.notes == {"step": found.step}
    assert np.all(np.asarray(found.state["w"]) == found.step)
    assert int(found.state["n"]) == found.step
    return found.step


def _read_or_miss(folder: pathlib.Path, step: int | None) -> int:
    """Return the step that was read, or 0 for the error that it is missing."""
    try:
        return _read(folder, step)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        if step is None or f"Checkpoint {step} is not in" not in str(error):
            raise
        return 0


def _replay(saved: pathlib.Path, folder: pathlib.Path) -> Callable[[], None]:
    """Return what a writer does with `keep=1` when checkpoint 3 is complete."""
    shutil.copytree(saved, folder)
    ready = folder.with_name("ready")
    (folder / "3").rename(ready)

    def complete() -> None:
        ready.rename(folder / "3")
        for old in 1, 2:
            LocalStorage(folder).delete(old)

    return complete


@pytest.mark.parametrize("step", [None, 2])
def test_a_checkpoint_that_is_deleted_at_any_point_of_a_read_is_whole_or_missing(
    saved: pathlib.Path, tmp_path: pathlib.Path, step: int | None
) -> None:
    outcomes = set()
    for k in range(1, 500):
        folder = tmp_path / f"at {k}" / "saved"
        complete = _replay(saved, folder)
        with POINTS.at(k, folder, complete):
            outcomes.add(_read_or_miss(folder, step))
        if not POINTS.has_fired:
            break
        shutil.rmtree(folder.parent)
    else:
        pytest.fail("a read has fewer points")
    assert k > 5
    # Read before the deletion; and after it, the newer one or an error.
    assert outcomes == ({2, 3} if step is None else {0, 2})


def test_the_newest_that_is_left_is_read_when_later_ones_are_discarded(
    saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    outcomes = set()
    for k in range(1, 12):
        folder = tmp_path / f"at {k}" / "saved"
        shutil.copytree(saved, folder)

        def discard(folder: pathlib.Path = folder) -> None:
            for step in 3, 2:
                LocalStorage(folder).delete(step)

        with POINTS.at(k, folder, discard):
            outcomes.add(_read(folder, None))
    assert 1 in outcomes
    assert outcomes <= {1, 3}


def test_a_reader_sees_whole_checkpoints_while_a_writer_deletes_old_ones(
    tmp_path: pathlib.Path,
) -> None:
    """With the writer's own code, which saves and deletes at each point."""
    seen = set()
    with Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, _make_state(1), {"step": 1})
        writer.wait_until_finished()
        for step in range(2, 12):

            def save(step: int = step) -> None:
                writer.save(step, _make_state(step), {"step": step})
                writer.wait_until_finished()
                assert list_steps(tmp_path) == (step,)

            with POINTS.at(3 * step - 5, tmp_path, save):
                seen.add(_read(tmp_path, None) - step)
            if not POINTS.has_fired:
                save()
    assert 0 in seen
    assert seen <= {-1, 0}


def test_orbax_deletes_nothing_itself(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would delete file by file, under the name of a complete checkpoint."""
    monkeypatch.setattr(LocalStorage, "delete", lambda *_: None)
    with Checkpoints(tmp_path, keep=1) as writer:
        for step in 1, 2, 3:
            writer.save(step, _make_state(step))
        assert writer.steps() == (1, 2, 3)
