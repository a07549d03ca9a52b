"""What a checkpoint cannot keep apart or read again is refused when it is saved."""

import contextlib
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ArgumentError, ArgumentTypeError, CheckpointError, ContextError
from jaxdist.training import Checkpoints

ONE, TWO = jnp.ones(2), jnp.zeros(2)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a.b": ONE, "a": {"b": TWO}}, "'a.b'"),
        ({"": ONE, "value": TWO}, "'value'"),
        ({"a.": {"b": ONE}, "a": {".b": TWO}}, "'a..b'"),
        ([{"0.x": ONE}, {"x": TWO}, {"0": {"x": ONE}, "0.x": TWO}], "'2.0.x'"),
    ],
    ids=["a dot", "an empty key", "dots at the end", "below a list"],
)
def test_two_leaves_of_one_name_are_refused_and_none_is_lost(
    tmp_path: Path, state: Any, name: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentError, match=name):
            checkpoints.save(1, state)
        checkpoints.save(1, {"a.b": ONE})
        with pytest.raises(ArgumentError, match=r"'a\.b'"):
            checkpoints.restore({"a.b": ONE, "a": {"b": TWO}})


@pytest.mark.parametrize("kind", ["i2", "i4", "i8", "u4", "f2", "f4", "f8", "c8"])
def test_numbers_in_another_byte_order_are_refused_when_they_are_saved(
    tmp_path: Path, kind: str
) -> None:
    other = np.dtype(kind).newbyteorder("S")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match=np.dtype(kind).name):
            checkpoints.save(1, {"w": np.arange(3).astype(other)})
        native = np.arange(3).astype(kind)
        checkpoints.save(1, {"w": native})
        restored = checkpoints.restore({"w": native})
    assert restored is not None
    assert np.array_equal(restored.state["w"], native)


@pytest.mark.parametrize(
    ("kind", "found"), [([("x", "f4"), ("y", "i4")], "dict of arrays"), ("V3", "dtype |V3")]
)
def test_arrays_of_records_are_refused_when_they_are_saved(
    tmp_path: Path, kind: Any, found: str
) -> None:
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ArgumentTypeError, match=re.escape(found)),
    ):
        checkpoints.save(1, {"w": np.zeros(3, kind), "b": ONE})


def test_notes_whose_keys_are_one_string_in_json_are_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentError, match="the same string in JSON"):
            checkpoints.save(1, {"w": ONE}, {"best": {1: 0.5, "1": 0.25}})
        checkpoints.save(1, {"w": ONE}, {"best": {1: 0.5, "2": 0.25}})
        restored = checkpoints.restore({"w": ONE})
    assert restored is not None
    assert restored.notes == {"best": {"1": 0.5, "2": 0.25}}


@pytest.mark.parametrize("kind", ["run", "jit"])
def test_a_traced_state_is_refused_and_the_folder_can_be_used(tmp_path: Path, kind: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with Checkpoints(tmp_path) as checkpoints:

        def step(w: jax.Array) -> jax.Array:
            checkpoints.save(1, {"w": w})
            return w

        with pytest.raises(ContextError, match=r"state\['w'\], a traced value"):
            strategy.run(step, (ONE,)) if kind == "run" else jax.jit(step)(ONE)
        checkpoints.save(1, {"w": ONE})
        assert checkpoints.steps() == (1,)


def _read_all(folder: Path) -> dict[int, float]:
    with Checkpoints(folder) as checkpoints:
        found = {}
        for step in checkpoints.steps():
            restored = checkpoints.restore({"w": jnp.zeros(100_000, int)}, step=step)
            assert restored is not None
            found[step] = float(restored.state["w"][-1])
    return found


def test_two_objects_of_one_process_save_one_after_the_other(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=9) as one, Checkpoints(tmp_path, keep=9) as other:
        for step in range(6):
            (one, other)[step % 2].save(step, {"w": jnp.full(100_000, step)})
            # The next one sees this checkpoint, although it may still be written.
            with pytest.raises(CheckpointError, match=f"save was given step={step}, and"):
                (other, one)[step % 2].save(step, {"w": jnp.full(100_000, -1)})
    assert _read_all(tmp_path) == {step: step for step in range(6)}


def test_threads_that_save_with_one_object_save_whole_checkpoints(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        gate, saved = threading.Barrier(6), []

        def save(step: int) -> None:
            gate.wait()
            # Only steps after those of the other threads so far can be saved.
            with contextlib.suppress(CheckpointError):
                checkpoints.save(step, {"w": jnp.full(100_000, step)})
                saved.append(step)

        threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 5 in saved
    assert _read_all(tmp_path) == {step: step for step in sorted(saved)}
