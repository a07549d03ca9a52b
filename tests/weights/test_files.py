"""A damaged file is an error and changes nothing; an export is complete or absent."""

import errno
import json
import os
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxdist import training
from jaxdist._weights import files
from jaxdist.errors import CheckpointError

MODEL = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8)}


def _zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(x) for name, x in MODEL.items()}


def _write(path: pathlib.Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{]", b"", "its header is not JSON"),
    "a list": (b"[3]", b"", "its header is not JSON"),
    "a hole": (_entry(data_offsets=[4, 12]), bytes(12), "'a' starts at byte"),
    "an overlap": (
        {**_entry(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        bytes(8),
        "'b' starts at byte",
    ),
    "a longer file": (_entry(), bytes(9), r"it has \d+ bytes, not \d+"),
    "an offset behind the end": (_entry(), bytes(7), r"it has \d+ bytes, not \d+"),
    "another size": (_entry(data_offsets=[0, 9]), bytes(9), "has 9 bytes"),
    "a negative length": (_entry(shape=[-2]), bytes(8), "the entry of 'a'"),
    "a text as length": (_entry(shape=["2"]), bytes(8), "the entry of 'a'"),
    "no shape": ({"a": {"dtype": "F32"}}, bytes(8), "the entry of 'a'"),
    "a number as entry": ({"a": 3}, bytes(8), "the entry of 'a'"),
    "a text as offset": (_entry(data_offsets=[0, "8"]), bytes(8), "the entry of 'a'"),
    "one offset": (_entry(data_offsets=[0]), bytes(8), "the entry of 'a'"),
    "a negative offset": (_entry(data_offsets=[-8, 0]), bytes(8), "the entry of 'a'"),
    "a dtype of part of a byte": (_entry(dtype="F4"), bytes(8), "with the dtype 'F4'"),
    "a dtype that is a list": (_entry(dtype=["F32"]), bytes(8), "the entry of 'a'"),
}


@pytest.mark.parametrize(("header", "data", "text"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header_is_named(
    header: Any, data: bytes, text: str, tmp_path: pathlib.Path
) -> None:
    _write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=text):
        training.load_weights({"a": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")


def test_a_file_that_is_cut_anywhere_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    training.export_weights(MODEL, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        model = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.int8)}
        with pytest.raises(CheckpointError):
            training.load_weights(model, path)
        assert not any(np.any(x) for x in model.values())
    huge = struct.pack("<Q", 1 << 60) + whole[8:]
    path.write_bytes(huge)
    with pytest.raises(CheckpointError, match="its header would have"):
        training.load_weights(_zeros(), path)


def test_a_file_that_ends_while_it_is_read_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    training.export_weights(MODEL, path)
    opened = files.open_weights

    def cut(name: str, place: Any) -> Any:
        found = opened(name, place)
        path.write_bytes(path.read_bytes()[:-2])
        return found

    monkeypatch.setattr("jaxdist._weights.load.open_weights", cut)
    with pytest.raises(CheckpointError, match="it ends before byte"):
        training.load_weights(_zeros(), path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "it is not an index"),
        ("{}", "it is not an index"),
        ('{"weight_map": 3}', "it is not an index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "which is not in its folder"),
        ('{"weight_map": {"a": 3}}', "which is not in its folder"),
        ('{"weight_map": {"a": ["x"], "b": 3}}', "which is not in its folder"),
        ('{"weight_map": {"a": "x.safetensors", "c": "x.safetensors"}}', r"1 array\(s\) are not"),
        ('{"weight_map": {"a": "y.safetensors"}}', "cannot be read: FileNotFoundError"),
    ],
)
def test_a_damaged_index_is_named(content: str, text: str, tmp_path: pathlib.Path) -> None:
    training.export_weights(MODEL, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=text):
        training.load_weights(_zeros(), tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    names = ("", "missing", "missing.safetensors", "folder.safetensors")
    for path in (tmp_path / name for name in names):
        with pytest.raises(CheckpointError, match="which has no weights"):
            training.load_weights(_zeros(), path)


class _Stop(BaseException):
    """As if the process was killed: no handler of errors catches it."""


def _steps_of_an_export(folder: pathlib.Path, stop: int | None) -> int:
    """Export, stop before the n-th change of a file, and return how many changes were made."""
    count = 0

    def wrap(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == stop:
                raise _Stop
            return act(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", wrap(os.replace))
        patch.setattr(files, "_list_content", wrap(files._list_content))
        patch.setattr(np, "ascontiguousarray", wrap(np.ascontiguousarray))
        patch.setattr(pathlib.Path, "unlink", wrap(pathlib.Path.unlink))
        try:
            training.export_weights(
                {name: x + 1 for name, x in MODEL.items()}, folder, max_shard_size=8
            )
        except _Stop:
            pass
    return count


def test_an_export_that_is_killed_anywhere_leaves_old_new_or_no_weights(
    tmp_path: pathlib.Path,
) -> None:
    most = _steps_of_an_export(tmp_path / "counted", None)
    assert most > 8
    kinds = set()
    for stop in range(1, most + 1):
        folder = tmp_path / str(stop)
        training.export_weights(MODEL, folder, max_shard_size=8)
        _steps_of_an_export(folder, stop)
        try:
            found = training.load_weights(_zeros(), folder)
        except CheckpointError as error:
            kinds.add("none" if "has no weights" in str(error) else str(error))
            continue
        more = {int(np.unique(found[name] - x).item()) for name, x in MODEL.items()}
        assert len(more) == 1, "torn"
        kinds |= more
    assert kinds == {"none", 0, 1}


def test_a_file_that_is_killed_anywhere_is_the_old_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    training.export_weights(MODEL, path)
    old = path.read_bytes()
    for stop in range(1, 4):
        _steps_of_an_export(path, stop)
        assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_disk_that_is_full_is_named_and_leaves_the_old_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    training.export_weights(MODEL, path)
    old = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "ascontiguousarray", fail)
    with pytest.raises(CheckpointError, match=r"^training\.export_weights cannot write"):
        training.export_weights({"a": MODEL["a"]}, path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_file_of_an_older_export_that_the_folder_no_longer_has_is_deleted(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "model-of-mine.safetensors").write_bytes(b"mine")
    training.export_weights(MODEL, tmp_path, max_shard_size=1)
    training.export_weights(MODEL, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model-of-mine.safetensors", "model.safetensors"]


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    read = os.preadv

    def count(opened: int, buffers: Any, offset: int) -> int:
        found = read(opened, buffers, offset)
        reads.append(found)
        return found

    monkeypatch.setattr(os, "preadv", count)
    return reads


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_bytes_of_a_slice_are_read(
    dim: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    whole = np.arange(256 * 65536, dtype=np.float32).reshape(256, 65536)
    safetensors.numpy.save_file({"x": whole}, path)
    reads = _count_reads(monkeypatch)
    # A quarter of the array, as a process of four has it.
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.P(*[None] * dim, "x")
    own = jax.device_put(np.zeros((256, 65536), np.float32), jax.NamedSharding(mesh, spec))
    sharding = own.sharding
    indices = dict(list(sharding.addressable_devices_indices_map(own.shape).items())[:2])
    monkeypatch.setattr(type(sharding), "addressable_devices_indices_map", lambda *_: indices)
    made: list[Any] = []

    def make(shape: Any, sharding: Any, arrays: Any, dtype: Any) -> Any:
        made.extend(arrays)
        return own

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", make)
    training.load_weights({"x": own}, path)
    for index, found in zip(indices.values(), made, strict=True):
        np.testing.assert_array_equal(found, whole[index])
    assert sum(reads) <= whole.nbytes / 4 + 4096


def test_replicas_of_an_array_read_it_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    training.export_weights({"x": np.ones((64, 1024), np.float32)}, path)
    size = path.stat().st_size
    reads = _count_reads(monkeypatch)
    mesh = jax.make_mesh((8,), ("x",))
    whole = jax.device_put(jnp.zeros((64, 1024)), jax.NamedSharding(mesh, jax.P()))
    columns = jax.device_put(jnp.zeros((64, 1024)), jax.NamedSharding(mesh, jax.P(None, "x")))
    for empty in (whole, columns):
        reads.clear()
        training.load_weights({"x": empty}, path)
        assert sum(reads) == size


def test_arrays_without_elements_come_back(tmp_path: pathlib.Path) -> None:
    model = {"z": np.zeros((0, 3), np.int64), "a": np.ones(4, np.float32), "b": np.ones(())}
    training.export_weights(model, tmp_path / "x.safetensors")
    assert safetensors.numpy.load_file(tmp_path / "x.safetensors").keys() == model.keys()
    empty = {name: np.zeros_like(x) for name, x in model.items()}
    found = training.load_weights(empty, tmp_path / "x.safetensors")
    assert all(np.array_equal(found[name], x) for name, x in model.items())
