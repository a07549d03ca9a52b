"""Checkpoints are complete or absent, equal bit for bit what was saved, and report damage."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist._checkpoints import save as save_module
from jaxdist._checkpoints.interrupts import Interrupts, delay_interrupts
from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DamagedCheckpointError,
    JaxdistError,
)
from jaxdist.training import Checkpoints
from tests.strategies.oracle import refused


def _state(scale: float = 1.0) -> dict[str, Any]:
    params = {"w": jnp.arange(500.0) * scale, "b": jnp.full((3, 4), scale, jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.key(7),
        "mask": np.asarray([True, False]),
        "empty": jnp.zeros((0, 3)),
        "step": jnp.int32(scale),
    }


def _bits(tree: Any) -> list[tuple[str, bytes]]:
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(raw)]


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 1, 2 and 3 of `_state(1)`, `_state(2)`, `_state(3)`; copy before use."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(directory, keep=5) as checkpoints:
        for step in 1, 2, 3:
            checkpoints.save(step, _state(step), {"epoch": step, "pair": (1, 2)})
    return directory


@pytest.fixture
def saved(three_saved: Path, tmp_path: Path) -> Path:
    """A copy of `three_saved` that the test may damage."""
    return Path(shutil.copytree(three_saved, tmp_path / "checkpoints"))


def test_what_is_restored_is_bit_for_bit_what_was_saved(saved: Path) -> None:
    with Checkpoints(saved) as checkpoints:
        restored = checkpoints.restore_latest(like=_state())
    assert restored is not None
    assert restored.step == 3
    assert restored.notes == {"epoch": 3, "pair": [1, 2]}
    assert jax.tree.structure(restored.state) == jax.tree.structure(_state())
    assert _bits(restored.state) == _bits(_state(3))
    np.testing.assert_array_equal(
        jax.random.uniform(restored.state["key"]), jax.random.uniform(_state()["key"])
    )


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_checkpoint_is_restored_under_another_number_of_replicas(
    tmp_path: Path, replicas: int
) -> None:
    four = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    other = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    state = {"w": jax.device_put(jnp.arange(12.0), four.replicated_sharding)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        like = {"w": jax.ShapeDtypeStruct((12,), jnp.float32)}
        restored = checkpoints.restore(1, like=like, sharding=other.replicated_sharding)
    w = restored.state["w"]
    assert w.sharding.is_equivalent_to(other.replicated_sharding, 1)
    np.testing.assert_array_equal(w, np.arange(12.0))


def test_a_split_array_is_saved_whole_and_restored_in_the_layout_of_the_target(
    tmp_path: Path,
) -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(jnp.arange(16.0), strategy.per_replica_sharding)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": split}, {})
        w = checkpoints.restore(1, like={"w": split}).state["w"]
    assert w.sharding.is_equivalent_to(split.sharding, 1)
    np.testing.assert_array_equal(w, np.arange(16.0))


def test_only_the_newest_are_kept_with_their_manifests(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in 10, 20, 30, 40:
            checkpoints.save(step, {"w": jnp.zeros(2)}, {})
        assert checkpoints.steps() == (30, 40)
    shown = sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("."))
    assert shown == ["30", "40", "manifests"]
    assert sorted(p.name for p in (tmp_path / "manifests").iterdir()) == ["30.json", "40.json"]


def test_nothing_to_restore_is_none_and_a_step_is_saved_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(like={}) is None
        checkpoints.save(1, {"w": jnp.zeros(2)}, {})
        with pytest.raises(CheckpointError, match=r"was given step=1, and .* exists"):
            checkpoints.save(1, {"w": jnp.ones(2)}, {})
        restored = checkpoints.restore(1, like={"w": jnp.zeros(2)})
    assert restored.state["w"].tolist() == [0, 0]


def test_notes_that_are_no_json_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match="values that JSON can represent"):
            checkpoints.save(1, {"w": jnp.zeros(2)}, {"loss": jnp.zeros(2)})
        assert checkpoints.steps() == ()


@pytest.mark.parametrize("state", [{}, {"w": jnp.zeros((0, 3)), "b": []}])
def test_a_state_without_elements_is_refused_before_anything_is_written(
    tmp_path: Path, state: Any
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with refused(ArgumentError, "Checkpoints.save was given state=", "Pass what is trained"):
            checkpoints.save(1, state)
        assert checkpoints.steps() == ()


def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file' cannot be used"):
        Checkpoints(tmp_path / "file")


def test_saving_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)}, {})
        checkpoints.restore(1, like={"w": jnp.zeros(2)})
    # Orbax lets go of its threads without waiting for them.
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(timeout=60)
    assert not [thread for thread in left if thread.is_alive()]


# Another model


def test_a_checkpoint_of_another_model_lists_each_differing_leaf_with_both_shapes(
    saved: Path,
) -> None:
    like = _state()
    like["params"] = {"w": jnp.zeros((5, 100)), "b": jnp.zeros((3, 4)), "new": jnp.zeros(2)}
    del like["mask"]
    with Checkpoints(saved) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore_latest(like=like, skip_damaged=True)
    message = str(caught.value)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert "4 of its leaves differ" in message
    assert "params.w: saved float32[500], wanted float32[5, 100]" in message
    assert "params.b: saved bfloat16[3, 4], wanted float32[3, 4]" in message
    assert "params.new: saved nothing, wanted float32[2]" in message
    assert "mask: saved bool[2], wanted nothing" in message


# Damage


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def _overwrite(data: bytes) -> bytes:
    return bytes(b ^ 0xA5 for b in data)


_WAYS: dict[str, Callable[[bytes], bytes] | None] = {
    "removed": None,
    "emptied": lambda data: b"",
    "cut": _cut,
    "flipped": _flip,
    "overwritten": _overwrite,
}


def _files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def _damage(file: Path, way: str) -> bool:
    """Damage a file; whether that changed anything."""
    change, data = _WAYS[way], file.read_bytes()
    if change is None:
        file.unlink()
        return True
    file.write_bytes(change(data) if data else data)
    return file.read_bytes() != data


@pytest.mark.parametrize("way", _WAYS)
def test_whichever_file_is_damaged_it_is_named_and_the_one_before_is_offered(
    saved: Path, tmp_path: Path, way: str
) -> None:
    for original in _files(saved / "3"):
        copy = Path(shutil.copytree(saved, tmp_path / "copy"))
        file = copy / original.relative_to(saved)
        changed = _damage(file, way)
        with Checkpoints(copy) as checkpoints:
            if changed:
                with pytest.raises(DamagedCheckpointError) as caught:
                    checkpoints.restore_latest(like=_state())
                assert str(file) in str(caught.value)
                assert "step 2" in str(caught.value)
                assert "--resume-from-previous" in str(caught.value)
            assert checkpoints.steps() == (1, 2, 3)
        shutil.rmtree(copy)


_RESTORE_DAMAGED = """
import sys
from tests.checkpoints import test_checkpoints
test_checkpoints.restore_each_with_a_damaged_file(*sys.argv[1:])
"""


# Orbax abandons the reads beside one that fails, and they complain when they are collected, which
# is up to its threads: a process of their own keeps them out of other tests.
def test_without_a_manifest_damage_is_an_error_or_harms_no_value(
    saved: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            _RESTORE_DAMAGED,
            str(saved),
            str(tmp_path / "copy"),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    damaged, harmless = map(int, ended.stdout.split()[-2:])
    assert damaged > 10
    assert harmless > 0


def restore_each_with_a_damaged_file(saved: str, copy: str) -> None:
    """Damage each file of checkpoint 3 in every way, without a manifest."""
    damaged = harmless = 0
    for way in ("removed", "cut", "flipped"):
        for original in _files(Path(saved) / "3"):
            shutil.copytree(saved, copy)
            shutil.rmtree(Path(copy) / "manifests")
            _damage(Path(copy) / original.relative_to(saved), way)
            with Checkpoints(copy) as checkpoints:
                try:
                    restored = checkpoints.restore(3, like=_state())
                except DamagedCheckpointError:
                    damaged += 1
                else:
                    harmless += 1
                    assert _bits(restored.state) == _bits(_state(3))
                    assert restored.notes["epoch"] == 3
            shutil.rmtree(copy)
    print(damaged, harmless)


# Files whose damage stops Orbax before it starts reads that it would abandon.
_FAULTS: dict[str, tuple[str, bytes | None, str]] = {
    "notes that are gone": ("notes/metadata", None, "The notes cannot be read."),
    "checksums that are gone": (
        "leaves/process_0.json",
        None,
        "leaves has no checksums of process 0 of 1.",
    ),
    "checksums that are no JSON": ("leaves/process_0.json", b"{", "The checksums cannot be read: "),
    "checksums without a list": ("leaves/process_0.json", b"{}", "The checksums cannot be read: "),
    "a state without a description": ("state/_METADATA", b"{", "JSONDecodeError: "),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_without_a_manifest_each_part_that_cannot_be_read_is_named(saved: Path, fault: str) -> None:
    name, content, reason = _FAULTS[fault]
    shutil.rmtree(saved / "manifests")
    file = saved / "3" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with Checkpoints(saved) as checkpoints:
        parts = f"Checkpoint 3 in {saved}", reason, "step 2", "--resume-from-previous"
        with refused(DamagedCheckpointError, *parts) as caught:
            checkpoints.restore(3, like=_state())
        assert checkpoints.restore(2, like=_state()).step == 2
    assert str(caught.value).count("\n\n") == 2


def test_when_asked_a_damaged_checkpoint_is_set_aside_and_the_one_before_restored(
    saved: Path,
) -> None:
    (saved / "3" / "notes" / "metadata").unlink()
    (saved / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    with Checkpoints(saved) as checkpoints:
        restored = checkpoints.restore_latest(like=_state(), skip_damaged=True)
        assert restored is not None
        assert restored.step == 1
        assert restored.set_aside == (saved / "damaged" / "3", saved / "damaged" / "2")
        assert _bits(restored.state) == _bits(_state(1))
        assert checkpoints.steps() == (1,)
        checkpoints.save(2, _state(2), {})
        assert checkpoints.restore_latest(like=_state()).step == 2  # type: ignore[union-attr]


def test_a_manifest_of_an_earlier_checkpoint_of_the_step_is_not_used(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "3" / "notes" / "metadata").unlink()
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.restore_latest(like=_state(), skip_damaged=True) is not None
        # As if the process was killed between the checkpoint and its manifest.
        monkeypatch.setattr(LocalStorage, "_write_manifest", lambda *_: None)
        checkpoints.save(3, _state(5), {})
        assert _bits(checkpoints.restore(3, like=_state()).state) == _bits(_state(5))


def test_when_all_are_damaged_nothing_is_moved_and_the_oldest_is_named(saved: Path) -> None:
    for step in 1, 2, 3:
        (saved / str(step) / "notes" / "metadata").unlink()
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=r"Checkpoint 1 (.|\n)*No earlier one"):
            checkpoints.restore_latest(like=_state(), skip_damaged=True)
        assert checkpoints.steps() == (1, 2, 3)


# Arguments that contradict each other

_Call = Callable[[Checkpoints], Any]
_CALLS: dict[str, tuple[_Call, type[JaxdistError], tuple[str, ...]]] = {
    "notes that are a list": (
        lambda checkpoints: checkpoints.save(4, _state(), ["epoch", 1]),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("Checkpoints.save was given notes=['epoch', 1]", "a dict", "notes={'epoch': 1}"),
    ),
    "a step twice": (
        lambda checkpoints: checkpoints.restore(3, step=2, like=_state()),  # type: ignore[call-overload]
        ArgumentError,
        (
            "Checkpoints.restore was given like=, and step=2",
            "step is left out",
            "restore(7, like=state)",
        ),
    ),
    "a state twice": (
        lambda checkpoints: checkpoints.restore({"w": 1.0}, like=_state()),  # type: ignore[call-overload]
        ArgumentError,
        ("was given like=, and state={'w': 1.0}", "number of the checkpoint", "state, step=7"),
    ),
    "a given step and the newest that is good": (
        lambda checkpoints: checkpoints.restore(_state(), step=2, skip_damaged=True),
        ArgumentError,
        ("skip_damaged=True, and the step 2", "newest good", "Leave the step out"),
    ),
    "a given step of new objects and the newest that is good": (
        lambda checkpoints: checkpoints.restore(  # type: ignore[call-overload]
            3, like=_state(), skip_damaged=True
        ),
        ArgumentError,
        ("skip_damaged=True, and the step 3", "newest good", "Leave the step out"),
    ),
}


@pytest.mark.parametrize("name", _CALLS)
def test_arguments_that_contradict_each_other_are_refused(saved: Path, name: str) -> None:
    call, error, parts = _CALLS[name]
    with Checkpoints(saved) as checkpoints:
        with refused(error, *parts) as caught:
            call(checkpoints)
        assert checkpoints.steps() == (1, 2, 3)
    assert str(caught.value).count("\n\n") == 2


@pytest.mark.parametrize("name", ["run#1", "100%25", "a run", "what?", "x%41"])
def test_the_name_of_a_folder_is_not_read_as_an_address(tmp_path: Path, name: str) -> None:
    with Checkpoints(tmp_path / name) as checkpoints:
        checkpoints.save(1, _state(1), {})
        assert _bits(checkpoints.restore(1, like=_state()).state) == _bits(_state(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]


# Cut short


def test_ctrl_c_while_a_checkpoint_is_written_waits_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_part = save_module.start_part

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return start_part(*args)

    monkeypatch.setattr(save_module, "start_part", interrupted)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(1, _state(1), {})
        assert checkpoints.steps() == (1,)
        assert _bits(checkpoints.restore(1, like=_state()).state) == _bits(_state(1))


def test_a_checkpoint_that_cannot_be_written_names_the_last_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, _state(1), {})
        checkpoints.wait_until_finished()
        monkeypatch.setattr(save_module, "start_part", full)
        with pytest.raises(CheckpointError, match=r"No space left(.|\n)*complete one is of step 1"):
            checkpoints.save(2, _state(2), {})
        assert checkpoints.steps() == (1,)


# Copies the directory at every file operation of Python's while checkpoint 4 is written and
# checkpoint 1 deleted: each copy is the state that a SIGKILL at that point would leave.
_SNAPSHOTS = """
import shutil, sys, threading
import jax
jax.config.update("jax_num_cpu_devices", 1)
import jax.numpy as jnp
from jaxdist.training import Checkpoints

source, target = sys.argv[1:]
counting, lock, busy, taken = False, threading.Lock(), threading.local(), 0
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}

def watch(event, arguments):
    global taken
    if not counting or event not in EVENTS or getattr(busy, "here", False):
        return
    if not str(arguments[0]).startswith(source):
        return
    busy.here = True
    try:
        with lock:
            taken += 1
            copy = f"{target}/{taken}"
            shutil.copytree(source, copy)
    except (shutil.Error, OSError):
        shutil.rmtree(copy)  # another thread changed the files under the copy
    finally:
        busy.here = False

sys.addaudithook(watch)
with Checkpoints(source, keep=3) as checkpoints:
    for step in 1, 2, 3:
        checkpoints.save(step, {"w": jnp.full(100, step)}, {"step": step})
    checkpoints.wait_until_finished()
    counting = True
    checkpoints.save(4, {"w": jnp.full(100, 4)}, {"step": 4})
    checkpoints.wait_until_finished()
    counting = False
print(taken)
"""


def test_killed_at_any_file_operation_the_newest_complete_checkpoint_is_restored(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxdist.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", _SNAPSHOTS, str(source), str(target)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    snapshots = sorted(target.iterdir(), key=lambda p: int(p.name))
    assert len(snapshots) > 20
    found = []
    for snapshot in snapshots:
        with Checkpoints(snapshot) as checkpoints:
            restored = checkpoints.restore_latest(like={"w": jnp.zeros(100, int)})
        assert restored is not None
        assert restored.state["w"].tolist() == [restored.step] * 100
        assert restored.notes == {"step": restored.step}
        found.append(restored.step)
    assert found == sorted(found)
    assert set(found) == {3, 4}


def test_the_manifest_is_json_with_the_size_of_every_file(saved: Path) -> None:
    files = json.loads((saved / "manifests" / "3.json").read_text())
    assert {name: size for name, (size, _) in files.items()} == {
        str(p.relative_to(saved / "3")): p.stat().st_size for p in _files(saved / "3")
    }


def test_ctrl_c_waits_for_what_must_not_be_cut_in_two() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def body() -> None:
        with delay_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_waits_for_a_check_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
