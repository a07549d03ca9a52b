"""What the processes of a job run for the tests of failing saves."""

import json
import os
import pathlib
import signal
import sys
import time
import unittest.mock
from typing import Any

import jax
import numpy as np

import jaxdist
from jaxdist._checkpoints import parts
from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist._values import put
from jaxdist.errors import CheckpointError, OtherProcessError
from jaxdist.training import Checkpoints

FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"}


def make_state(strategy: jaxdist.Strategy, step: int) -> dict[str, Any]:
    """Return a sharded array, a replicated one, and one of the host; all say the step."""
    whole = np.full((8, 4), step, "float32")
    return {
        "sharded": put(whole, strategy.per_replica_sharding),
        "replicated": put(whole, strategy.replicated_sharding),
        "host": np.full(3, step),
    }


def is_whole(state: dict[str, Any], step: int) -> bool:
    """Whether all values of a restored state say the step."""
    return all(np.unique(np.asarray(x)).tolist() == [step] for x in state.values())


def count_file_operations(folder: str, act: Any) -> None:
    """Call `act` with the number of each file operation in the folder, beginning with 1."""
    seen = 0

    def hook(event: str, arguments: Any) -> None:
        nonlocal seen
        if event in FILE_EVENTS and str(arguments[0]).startswith(folder):
            seen += 1
            act(seen)

    sys.addaudithook(hook)


def save_until_killed(folder: str, victim: int, k: int) -> dict[str, Any]:
    """Save steps 1 and 2; the victim is killed at its k-th file operation of the second save."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    index = jax.process_index()
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, make_state(strategy, 1), {"step": 1})
        checkpoints.wait_until_finished()
        if index == victim:
            count_file_operations(
                folder, lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == k else None
            )
        began = time.monotonic()
        try:
            checkpoints.save(2, make_state(strategy, 2), {"step": 2})
            checkpoints.wait_until_finished()
        except OtherProcessError as error:
            return {
                "error": type(error).__name__,
                "processes": error.processes,
                "message": str(error),
                "seconds": time.monotonic() - began,
            }
    return {"error": None}


def save_with_failing_disk(folder: str, victim: int) -> list[str]:
    """Save steps 1, 2 and 3; the disk of one process is full in the second. Return the errors."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    errors = []
    format_records = parts.format_records

    def fail(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    with Checkpoints(folder) as checkpoints:
        for step in (1, 2, 3):
            is_bad = step == 2 and jax.process_index() == victim
            vars(parts)["format_records"] = fail if is_bad else format_records
            try:
                checkpoints.save(step, make_state(strategy, step))
                checkpoints.wait_until_finished()
            except CheckpointError as error:
                errors.append(str(error))
        state = checkpoints.restore(make_state(strategy, 0))
        assert state is not None
        errors.append(str(state.step))
    return errors


def save_where_a_file_is(folder: str) -> list[str]:
    """Save step 1, and step 2 while a file has the place of the folder. Return the errors."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    place, elsewhere = pathlib.Path(folder, "saved"), pathlib.Path(folder, "moved")
    is_first = jax.process_index() == 0
    errors = []
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, make_state(strategy, 1))
        checkpoints.wait_until_finished()
        if is_first:
            place.rename(elsewhere)
            place.touch()
        try:
            checkpoints.save(2, make_state(strategy, 2))
        except CheckpointError as error:
            errors.append(str(error))
        if is_first:
            place.unlink()
            elsewhere.rename(place)
        checkpoints.save(3, make_state(strategy, 3))
        checkpoints.wait_until_finished()
        state = checkpoints.restore(make_state(strategy, 0))
        assert state is not None
        return [*errors, str(state.step)]


def save_into_own_folder(folder: str) -> str:
    """Save into a folder that only this process has; return the error."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    own = f"{folder}/{jax.process_index()}"
    with Checkpoints(own) as checkpoints:
        try:
            checkpoints.save(1, make_state(strategy, 1))
        except CheckpointError as error:
            return str(error)
    return "no error"


def restore_from_own_folder(folder: str) -> str:
    """Restore from a folder of which the other process has another content."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    own = f"{folder}/{jax.process_index()}"
    with Checkpoints(own) as checkpoints:
        try:
            checkpoints.restore(make_state(strategy, 1))
        except CheckpointError as error:
            return str(error)
    return "no error"


def save_other_steps(folder: str) -> dict[str, Any]:
    """Save different steps in the two processes."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1 + jax.process_index(), make_state(strategy, 1))
    except OtherProcessError as error:
        return {"error": type(error).__name__, "processes": error.processes, "text": str(error)}
    return {"error": None}


def save_without_one(folder: str, call: str, seconds: float) -> dict[str, Any]:
    """Process 1 does something else while process 0 saves or restores, with a time limit."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    done = pathlib.Path(folder) / "done"
    if jax.process_index() == 1:
        end = time.monotonic() + 60
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return {"error": None}
    began = time.monotonic()
    try:
        with Checkpoints(f"{folder}/saved", timeout_seconds=seconds) as checkpoints:
            if call == "save":
                checkpoints.save(1, make_state(strategy, 1))
            else:
                checkpoints.restore(make_state(strategy, 1))
        return {"error": None}
    except OtherProcessError as error:
        return {
            "error": type(error).__name__,
            "processes": error.processes,
            "first": str(error).splitlines()[0],
            "seconds": time.monotonic() - began,
            "text": str(error),
        }
    finally:
        done.touch()


def restore_damaged(folder: str) -> dict[str, Any]:
    """Save two steps, damage the second, and restore with and without `skip_damaged`."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    errors = []
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(strategy, step))
        checkpoints.wait_until_finished()
        if jax.process_index() == 0:
            _damage(pathlib.Path(folder) / "2")
        try:
            checkpoints.restore(make_state(strategy, 0))
        except CheckpointError as error:
            errors.append(type(error).__name__)
        found = checkpoints.restore(make_state(strategy, 0), skip_damaged=True)
        assert found is not None
        return {"errors": errors, "step": found.step, "moved": [str(p) for p in found.set_aside]}


def _damage(folder: pathlib.Path) -> None:
    for path in (folder / "state").glob("ocdbt.process_*/d/*"):
        content = path.read_bytes()
        path.write_bytes(bytes(len(content)))


def job_ids(_: str) -> str:
    """Return the id of the job, as the lock of a folder has it."""
    jaxdist.MultiWorkerMirroredStrategy()
    from jaxdist._checkpoints.folder_lock import get_job_id

    return json.dumps(get_job_id())


def go_back(folder: str) -> dict[str, Any]:
    """Save steps 4 to 6, then a lower one; go back to step 4; then disagree on a step."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    with Checkpoints(folder) as checkpoints:
        for step in (4, 5, 6):
            checkpoints.save(step, make_state(strategy, step))
        refused = _catch(lambda: checkpoints.save(1, make_state(strategy, 1)))
        kept = checkpoints.steps()
        is_first = jax.process_index() == 0
        delete = LocalStorage.delete
        patch = unittest.mock.patch.object(LocalStorage, "delete", _deny if is_first else delete)
        with patch:
            denied = _catch(lambda: checkpoints.discard_after(4))
        deleted = checkpoints.discard_after(4)
        checkpoints.save(5, make_state(strategy, 50))
        found = checkpoints.restore(make_state(strategy, 0))
        assert found is not None
        own = {n: x.addressable_data(0) for n, x in found.state.items() if n != "host"}
        mismatch = _catch(lambda: checkpoints.discard_after(jax.process_index()))
    return {
        "refused": refused,
        "kept": kept,
        "denied": denied,
        "deleted": deleted,
        "restored": (found.step, is_whole(own, 50)),
        "mismatch": mismatch,
    }


def _deny(*_: Any) -> None:
    raise PermissionError(13, "Permission denied")


def _catch(act: Any) -> str:
    try:
        act()
    except (CheckpointError, OtherProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def discard_until_killed(folder: str, victim: int, k: int) -> str:
    """Save steps 4 to 6 and go back to 4; the victim is killed at a file operation of that."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    with Checkpoints(folder, timeout_seconds=60) as checkpoints:
        for step in (4, 5, 6):
            checkpoints.save(step, make_state(strategy, step), {"step": step})
        checkpoints.wait_until_finished()
        if jax.process_index() == victim:
            count_file_operations(
                folder, lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == k else None
            )
        return _catch(lambda: checkpoints.discard_after(4))
