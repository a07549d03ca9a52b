"""`save` returns before anything is written; nothing is lost, and no failure is silent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist._checkpoints import parts as parts_module
from jaxdist.errors import CheckpointError
from jaxdist.training import Checkpoints

ROOT = Path(__file__).parents[2]
_NEW = "orbax-checkpoint-tmp"  # in the name of a directory that is being written
_WRITERS = {"array_type_handler", "np_type_handler"}


class Gate:
    """Holds the threads in which Orbax writes arrays, and lets writes fail on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.held: set[str] = set()
        self.action: Callable[[], None] = lambda: None
        start, format_records = threading.Thread.start, parts_module.format_records

        def start_held(thread: threading.Thread) -> None:
            if thread.name in _WRITERS:
                run = thread.run
                self.held.add(thread.name)
                vars(thread)["run"] = lambda: self._run(run)
            start(thread)

        def act_and_format(*arguments: Any) -> str:
            self.action()
            self.wait()
            return format_records(*arguments)

        monkeypatch.setattr(threading.Thread, "start", start_held)
        monkeypatch.setattr(parts_module, "format_records", act_and_format)

    def _run(self, run: Callable[[], None]) -> None:
        self.wait()
        run()

    def wait(self) -> None:
        self._open.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is open at the latest when the test ends."""
    made = Gate(monkeypatch)
    yield made
    made.open()


def _fill_disk() -> None:
    raise OSError(28, "No space left on device")


def _list_written(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def _list_arrays(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.parent.name == "d"]


def test_save_returns_before_anything_is_written_and_each_reader_waits(
    tmp_path: Path, gate: Gate
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(3)})
        assert checkpoints.is_saving_in_progress()
        assert gate.held == {"array_type_handler"}
        assert _list_arrays(tmp_path) == []
        gate.open()
        assert checkpoints.steps() == (1,)
        assert not checkpoints.is_saving_in_progress()
        checkpoints.save(2, {"w": jnp.arange(3) + 2})
        restored = checkpoints.restore({"w": jnp.zeros(3, int)})
        assert restored is not None
        assert (restored.step, restored.state["w"].tolist()) == (2, [2, 3, 4])
        checkpoints.save(3, {"w": jnp.arange(3)})
        latest = checkpoints.restore_latest(like={"w": jnp.zeros(3, int)})
        assert latest is not None
        assert latest.step == 3
    assert _list_written(tmp_path) == ["1", "2", "3", "manifests"]


def test_what_is_changed_donated_or_deleted_after_save_is_written_as_it_was(
    tmp_path: Path, gate: Gate
) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(8)])
    values = np.arange(1 << 16, dtype=np.float32)
    on_host, model = values.copy(), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    count = jaxdist.Variable(jnp.float32(7))
    arrays = {
        "one": jnp.array(values),
        "sharded": jax.device_put(values, strategy.per_replica_sharding),
        "replicated": jax.device_put(values, strategy.replicated_sharding),
        "deleted": jax.device_put(values, strategy.per_replica_sharding),
    }
    kernel = np.array(model.kernel[...])
    notes = {"list": [1]}
    state = {**arrays, "host": on_host, "model": model, "count": count}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, notes)
        overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
        changed = [overwrite(arrays[name]) for name in ("one", "sharded", "replicated")]
        jax.block_until_ready(changed)
        assert all((x == -1).all() for x in changed)
        arrays["deleted"].delete()
        on_host[:] = -1
        model.kernel[...] = jnp.zeros_like(model.kernel[...])
        count.assign(jnp.float32(0))
        notes["list"].append(2)
        assert gate.held == _WRITERS
        assert _list_arrays(tmp_path) == []
        gate.open()
        plain = jax.ShapeDtypeStruct(values.shape, values.dtype)
        like = {**dict.fromkeys(arrays, plain), "host": on_host, "model": model, "count": count}
        restored = checkpoints.restore(1, like=like)
    for name in (*arrays, "host"):
        np.testing.assert_array_equal(restored.state[name], values)
    np.testing.assert_array_equal(restored.state["model"].kernel[...], kernel)
    assert float(restored.state["count"]) == 7
    assert restored.notes == {"list": [1]}


_NEXT_CALLS: dict[str, Callable[[Checkpoints], Any]] = {
    "save": lambda c: c.save(3, {"w": jnp.zeros(2)}),
    "steps": lambda c: c.steps(),
    "restore": lambda c: c.restore({"w": jnp.zeros(2)}),
    "restore like": lambda c: c.restore(1, like={"w": jnp.zeros(2)}),
    "restore_latest": lambda c: c.restore_latest(like={"w": jnp.zeros(2)}),
    "wait_until_finished": lambda c: c.wait_until_finished(),
    "close": lambda c: c.close(),
}


@pytest.mark.parametrize("name", _NEXT_CALLS)
def test_a_failure_in_the_background_is_raised_once_by_the_next_call(
    tmp_path: Path, gate: Gate, name: str
) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        gate.open()
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait_until_finished()
        gate.action = _fill_disk
        checkpoints.save(2, {"w": jnp.ones(2)})
        match = r"Checkpoint 2 cannot be written(.|\n)*No space(.|\n)*one is of step 1"
        with pytest.raises(CheckpointError, match=match):
            _NEXT_CALLS[name](checkpoints)
        gate.action = lambda: None
        # Nothing was deleted for the checkpoint that failed, and the next one can be written.
        assert checkpoints.steps() == (1,)
        checkpoints.save(2, {"w": jnp.full(2, 5.0)})
        restored = checkpoints.restore({"w": jnp.zeros(2)})
        assert restored is not None
        assert (restored.step, restored.state["w"].tolist()) == (2, [5, 5])
    assert _list_written(tmp_path) == ["2", "manifests"]


def test_when_the_failure_is_raised_no_thread_writes_any_more(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join

    def join_and_open(thread: threading.Thread, timeout: float | None = None) -> None:
        # The arrays wait for this thread, and this thread has to wait for them.
        if thread.name in _WRITERS and threading.current_thread() is threading.main_thread():
            gate.open()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_and_open)
    gate.action = _fill_disk
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        with pytest.raises(CheckpointError, match=r"Checkpoint 1 cannot be written(.|\n)*No space"):
            checkpoints.wait_until_finished()
        writers = [t for t in threading.enumerate() if t.name in {"records", *_WRITERS}]
        assert writers == []
        gate.action = lambda: None
        checkpoints.save(1, {"w": jnp.full(2, 5.0)})
        restored = checkpoints.restore(1, like={"w": jnp.zeros(2)})
    assert restored.state["w"].tolist() == [5, 5]


def test_leaving_with_raises_the_failure_or_adds_it_to_the_error_of_the_body(
    tmp_path: Path, gate: Gate
) -> None:
    gate.open()
    gate.action = _fill_disk

    def save_one(then: Callable[[], Any]) -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(2)})
            then()

    with pytest.raises(CheckpointError, match="No space left"):
        save_one(lambda: None)
    with pytest.raises(ZeroDivisionError) as caught:
        save_one(lambda: 1 // 0)
    assert any("No space left" in note for note in caught.value.__notes__)


def test_ctrl_c_while_a_call_waits_takes_effect_when_the_checkpoint_is_written(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join

    def join_and_open(thread: threading.Thread, timeout: float | None = None) -> None:
        if "_complete" in thread.name and threading.current_thread() is threading.main_thread():
            gate.open()
        join(thread, timeout)

    def interrupt() -> None:
        gate.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "join", join_and_open)
    gate.action = interrupt
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait_until_finished()
        gate.action = lambda: None
        assert checkpoints.steps() == (1,)


def test_no_thread_is_left_after_close_or_after_a_failure(tmp_path: Path, gate: Gate) -> None:
    before = set(threading.enumerate())
    gate.open()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(2)})
    checkpoints.wait_until_finished()
    gate.action = _fill_disk
    checkpoints.save(2, {"w": jnp.zeros(2)})
    with pytest.raises(CheckpointError):
        checkpoints.close()
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(timeout=60)
    assert not [thread for thread in left if thread.is_alive()]


# Real processes


def _run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


# Every file operation of Python's in the background, one after the other, fails once.
_FAIL_AT = """
import sys
import jax.numpy as jnp
from jaxdist.errors import CheckpointError
from jaxdist.training import Checkpoints

folder, at, seen, failed = sys.argv[1], None, 0, False
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}

def fail(event, arguments):
    global seen, failed
    if at is None or event not in EVENTS or not str(arguments[0]).startswith(folder):
        return
    seen += 1
    if seen == at:
        failed = True
        raise OSError(28, "No space left on device")

sys.addaudithook(fail)
step = errors = complete = 0
with Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(0, {"w": jnp.full(100, 0)}, {"step": 0})
    checkpoints.wait_until_finished()
    for k in range(1, 1000):
        step, seen, failed = step + 1, 0, False
        before = checkpoints.steps()
        at = k
        try:
            checkpoints.save(step, {"w": jnp.full(100, step)}, {"step": step})
            checkpoints.wait_until_finished()
        except CheckpointError as error:
            assert f"Checkpoint {step} cannot be written" in str(error), error
            assert set(checkpoints.steps()) <= {*before, step}
            errors += 1
        else:
            assert checkpoints.steps()[-1] == step
        at = None
        if not failed:
            break
        found = checkpoints.restore_latest(like={"w": jnp.zeros(100, int)})
        assert found.step in (before[-1], step)
        assert found.notes == {"step": found.step}
        assert found.state["w"].tolist() == [found.step] * 100
        complete += found.step == step
print(k, errors, complete)
"""


def test_whichever_file_operation_fails_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    ended = _run(_FAIL_AT, tmp_path / "saved")
    assert ended.returncode == 0, ended.stderr[-3000:]
    points, errors, complete = map(int, ended.stdout.split())
    assert points > 10
    assert errors > 5
    assert complete > 0, "a manifest that cannot be written leaves the checkpoint complete"


_EXIT = """
import sys
import jax.numpy as jnp
from jaxdist.training import Checkpoints

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": jnp.arange(1 << 20)})
{ending}
"""

_FAIL_AT_EXIT = """
from jaxdist._checkpoints import parts

def fail(*_):
    raise OSError(28, "No space left on device")

parts.format_records = fail
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("del checkpoints", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)],
)
def test_a_process_that_ends_without_close_completes_its_checkpoint(
    tmp_path: Path, ending: str, code: int
) -> None:
    ended = _run(_EXIT.replace("{ending}", ending), tmp_path)
    assert ended.returncode == code, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr or code == 1
    assert (tmp_path / "manifests" / "1.json").is_file()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (1,)
        restored = checkpoints.restore({"w": jnp.zeros(1 << 20, int)})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], np.arange(1 << 20))


def test_a_process_that_ends_without_close_reports_a_checkpoint_that_failed(
    tmp_path: Path,
) -> None:
    ended = _run(_FAIL_AT_EXIT + _EXIT.replace("{ending}", ""), tmp_path)
    assert ended.returncode == 0
    assert "Checkpoint 1 cannot be written" in ended.stderr
    assert "No space left" in ended.stderr
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == ()


# Never waits. What is saved is overwritten in place, and donated, at once.
_TRAIN = """
import itertools, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
import jaxdist
from jaxdist.training import Checkpoints

strategy = jaxdist.MirroredStrategy()
add = jax.jit(lambda x: x + 1, donate_argnums=0)
w = jax.device_put(jnp.zeros(1 << 18, int), strategy.per_replica_sharding)
host = np.zeros(1000, int)
with Checkpoints(sys.argv[1], keep=3) as checkpoints:
    for step in itertools.count(1):
        w = add(w)
        host += 1
        checkpoints.save(step, {"w": w, "host": host}, {"step": step})
        print("saved", step, flush=True)
"""


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_killed_after_the_kth_save_has_returned_every_checkpoint_is_whole(
    tmp_path: Path, k: int
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _TRAIN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(k)]
        assert lines[-1] == f"saved {k}\n"
    finally:
        child.kill()
        child.communicate()
    with Checkpoints(tmp_path) as checkpoints:
        steps = checkpoints.steps()
        # `save(k)` waits for the checkpoint before it.
        assert (steps[-1] if steps else 0) >= k - 1
        for step in steps[-2:]:
            like = {"w": jnp.zeros(1 << 18, int), "host": np.zeros(1000, int)}
            restored = checkpoints.restore(step, like=like)
            assert restored.notes == {"step": step}
            assert np.unique(restored.state["w"]).tolist() == [step]
            assert np.unique(restored.state["host"]).tolist() == [step]
        # The next job deletes what was written in part.
        checkpoints.save(10**6, {"w": jnp.zeros(2)})
    assert not [p for p in tmp_path.iterdir() if _NEW in p.name]
