"""Each shard has a checksum: any changed byte is found under any sharding, in any process."""

import functools
import json
import types
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist._checkpoints import restore as restore_module
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._checkpoints.records import (
    find_changed_values,
    format_records,
    list_own_shards,
    make_record,
    read_records,
    take_shards,
)
from jaxdist._processes import Process
from jaxdist.errors import DamagedCheckpointError
from jaxdist.training import Checkpoints

FIRST = Process(0, 1)
_DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64"]


@functools.cache
def _mesh(n: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))


def _put(values: np.ndarray, n: int, dim: int | None) -> jax.Array:
    spec = jax.P() if dim is None else jax.P(*[None] * dim, "x")
    return jax.device_put(values, jax.sharding.NamedSharding(_mesh(n), spec))


def _make_values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = np.random.default_rng(0).integers(0, 2, shape)
    return np.asarray(jnp.asarray(numbers, dtype))


_LAYOUTS = st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 0, 1]))


@hypothesis.given(saved=_LAYOUTS, restored=_LAYOUTS, dtype=st.sampled_from(_DTYPES), data=st.data())
def test_a_changed_byte_is_found_whatever_the_two_shardings_are(
    saved: Any, restored: Any, dtype: str, data: st.DataObject
) -> None:
    values = _make_values((24, 48), dtype)
    records = _make_records({"w": _put(values, *saved)})
    assert find_changed_values(records, {"w": _put(values, *restored)}) == []
    assert find_changed_values(records, {"w": values}) == []
    changed = values.copy().view(np.uint8)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in changed.shape)
    changed[at] ^= 1 if dtype == "bool" else data.draw(st.integers(1, 255))
    for array in _put(changed.view(values.dtype), *restored), changed.view(values.dtype):
        [problem] = find_changed_values(records, {"w": array})
        assert problem == "The values of w are not those that were saved."


@pytest.mark.parametrize(
    "value", [np.float32(2.5), np.zeros((0, 3)), jnp.int8(3), jnp.zeros((2, 0))]
)
def test_scalars_and_arrays_without_elements_have_records(value: Any) -> None:
    records = _make_records({"x": value})
    assert records["x"]["shape"] == list(np.shape(value))
    assert find_changed_values(records, {"x": value}) == []


# Four processes in one: process k has the devices 2 k and 2 k + 1.


def _make_records(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: make_record(*parts) for name, parts in take_shards(leaves, FIRST).items()}


def _take_shards(array: jax.Array, process: int) -> list[Any]:
    return [s for s in array.addressable_shards if s.device.id // 2 == process]


def _write_records(folder: Path, leaves: dict[str, Any], notes: Any) -> None:
    folder.mkdir(exist_ok=True)
    for process in range(4):
        written: dict[str, Any] = {}
        for name, leaf in leaves.items():
            shards = _take_shards(leaf, process) if isinstance(leaf, jax.Array) else []
            own = list_own_shards(leaf, shards, Process(process, 4))
            written[name] = (list(leaf.shape), str(leaf.dtype), own)
        own_notes = {**notes, "of_process": process} if process else notes
        text = format_records(written, own_notes, Process(process, 4))
        (folder / f"process_{process}.json").write_text(text)


@pytest.fixture
def leaves() -> dict[str, Any]:
    values = _make_values((8, 16), "float32")
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    on_grid = jax.sharding.NamedSharding(grid, jax.P("b"))  # each shard twice, in two processes
    return {
        "sharded": _put(values, 8, 0),
        "replicated": _put(values, 8, None),
        "both": jax.device_put(values, on_grid),
        "host": values,
    }


def test_four_processes_record_every_element_once(tmp_path: Path, leaves: dict[str, Any]) -> None:
    _write_records(tmp_path, leaves, {"epoch": 1})
    merged = read_records(tmp_path, {"epoch": 1})
    assert merged.keys() == leaves.keys()
    for name, record in merged.items():
        assert (record["shape"], record["dtype"]) == ([8, 16], "float32")
        times = np.zeros((8, 16), int)
        for where, _ in record["shards"]:
            times[tuple(slice(*r) for r in where)] += 1
        assert (times == 1).all(), name
    assert [len(merged[n]["shards"]) for n in leaves] == [8, 1, 4, 1]
    assert find_changed_values(merged, leaves) == []
    for name in leaves:
        wrong = np.array(leaves[name])
        wrong[5, 7] += 1
        assert len(find_changed_values(merged, {name: wrong})) == 1


def test_a_process_compares_the_ranges_that_it_has(leaves: dict[str, Any]) -> None:
    records = _make_records(leaves)
    wrong = np.array(leaves["sharded"])
    wrong[5, 7] += 1
    whole = _put(wrong, 8, 0)
    for process in range(4):
        shards = _take_shards(whole, process)
        part = types.SimpleNamespace(shape=(8, 16), dtype=wrong.dtype, addressable_shards=shards)
        found = find_changed_values(records, {"sharded": _JaxArray(part)})
        assert bool(found) == (process == 2), "row 5 is on device 5"


class _JaxArray(jax.Array):
    """An array of which this process has some shards."""

    shape: Any = None
    dtype: Any = None
    addressable_shards: Any = None

    def __init__(self, parts: Any) -> None:
        vars(self).update(vars(parts))


@pytest.mark.parametrize("change", ["file", "number", "notes"])
def test_records_that_are_incomplete_or_changed_are_refused(
    tmp_path: Path, leaves: dict[str, Any], change: str
) -> None:
    _write_records(tmp_path, leaves, {"epoch": 1})
    file = tmp_path / "process_2.json"
    if change == "file":
        file.unlink()
    if change == "number":
        text = json.loads(file.read_text())
        text["leaves"]["sharded"]["shards"][0][1] += 1
        file.write_text(json.dumps(text))
    words = "has no checksums of process 2 of 4" if change == "file" else "not those"
    with pytest.raises(UnreadableError, match=words):
        read_records(tmp_path, {"epoch": 2} if change == "notes" else {"epoch": 1})


# Whole checkpoints


def test_no_whole_copy_of_a_sharded_array_is_made_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(1 << 16, dtype=np.float32)
    state = {"w": _put(values, 8, 0)}
    copied: list[int] = []

    def record(function: Any) -> Any:
        def call(x: Any, *more: Any, **named: Any) -> Any:
            if isinstance(x, jax.Array):
                copied.append(x.nbytes)
            return function(x, *more, **named)

        return call

    # Orbax copies with these functions, too.
    for name in ("asarray", "array", "ascontiguousarray"):
        monkeypatch.setattr(np, name, record(getattr(np, name)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait_until_finished()
        assert len(copied) >= 8
        assert max(copied) == values.nbytes // 8
        copied.clear()
        restored = checkpoints.restore(1, like=state)
        assert len(copied) >= 8
        assert max(copied) == values.nbytes // 8
    monkeypatch.undo()
    np.testing.assert_array_equal(restored.state["w"], values)


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 8), (8, 3), (1, 8), (3, 1)])
@pytest.mark.parametrize("size", [24, 25])
def test_on_other_replicas_the_bits_are_the_same_and_a_changed_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, size: int
) -> None:
    def make_state(n: int, values: np.ndarray) -> dict[str, Any]:
        strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(n)])
        # With padding where the replicas do not divide the size.
        return {
            "sharded": jaxdist.shard_state(values, strategy, min_bytes=0),
            "split": _put(values[:24], n, 0),
        }

    values = np.random.default_rng(0).normal(size=(size, 5)).astype(np.float32)
    target = make_state(after, np.zeros_like(values))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(before, values))
        restored = checkpoints.restore(1, like=target)
        sharded = restored.state["sharded"]
        # With one replica it is an array.
        assert isinstance(sharded, jaxdist.Sharded) == (after > 1)
        whole = sharded.whole() if after > 1 else sharded
        np.testing.assert_array_equal(whole, values)
        np.testing.assert_array_equal(restored.state["split"], values[:24])
        assert restored.state["split"].sharding == target["split"].sharding
        read_arrays = restore_module.read_arrays

        def change_one(*arguments: Any) -> Any:
            arrays = read_arrays(*arguments)
            wrong = np.array(arrays["split"])
            wrong[23, 4] = -wrong[23, 4]
            return {**arrays, "split": jax.device_put(wrong, arrays["split"].sharding)}

        monkeypatch.setattr(restore_module, "read_arrays", change_one)
        with pytest.raises(DamagedCheckpointError, match="The values of split are not those"):
            checkpoints.restore(1, like=target)
