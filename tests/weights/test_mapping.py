"""A mapping reads what NumPy computes from the whole arrays of the file, slice by slice."""

import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import partition, training
from jaxdist._weights import mapping as mapping_module
from jaxdist._weights import slices
from jaxdist._weights.files import open_weights
from jaxdist._weights.leaves import ModelWeight
from jaxdist.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxdist.partition._placements import is_match
from tests.tables import examples

Weight = training.Weight


@st.composite
def _draw_changes(draw: st.DrawFn) -> tuple[np.ndarray, Any, np.ndarray]:
    """Draw an array, a weight of it, and what NumPy makes of the array."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    weight, wanted = Weight("x"), array
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "T", "index", "split", "merge", "new"]))
        if kind == "T":
            weight, wanted = weight.T, wanted.T
        elif kind == "transpose":
            dims = draw(st.permutations(range(wanted.ndim)))
            weight, wanted = weight.transpose(*dims), wanted.transpose(dims)
        elif kind == "index" and wanted.ndim:
            dim = draw(st.integers(0, wanted.ndim - 1))
            start = draw(st.integers(0, wanted.shape[dim] - 1))
            stop = draw(st.integers(start + 1, wanted.shape[dim]))
            step = draw(st.integers(1, 3))
            entry = draw(st.sampled_from([slice(start, stop, step), start, slice(start, None)]))
            index = (*[slice(None)] * dim, entry)
            weight, wanted = weight[index], wanted[index]
        elif kind == "new":
            weight, wanted = weight[None], wanted[None]
        elif kind == "split" and wanted.ndim:
            dim = draw(st.integers(0, wanted.ndim - 1))
            length = wanted.shape[dim]
            first = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
            new = (*wanted.shape[:dim], first, length // first, *wanted.shape[dim + 1 :])
            weight, wanted = weight.reshape(new), wanted.reshape(new)
        elif kind == "merge" and wanted.ndim > 1:
            weight, wanted = (
                weight.reshape(wanted.shape[0], -1),
                wanted.reshape(wanted.shape[0], -1),
            )
    return array, weight, np.ascontiguousarray(wanted).reshape(wanted.shape)


@settings(max_examples=examples(150, 2000), deadline=None)
@given(
    _draw_changes(),
    st.sampled_from([0, 64, 1 << 14]),
    st.sampled_from([16, 64, 1 << 26]),
    st.integers(1, 4),
)
def test_every_slice_of_every_change_is_what_numpy_computes(
    drawn: tuple[np.ndarray, Any, np.ndarray], gap: int, block: int, pieces: int
) -> None:
    array, weight, wanted = drawn
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_GAP_IN_FILE", gap)
        patch.setattr(slices, "_BLOCK", block)
        path = pathlib.Path(folder, "x.safetensors")
        safetensors.numpy.save_file({"x": array}, path)
        empty = np.zeros(wanted.shape, np.float32)
        whole = training.load_weights({"a": empty}, path, {"a": weight})
        np.testing.assert_array_equal(whole["a"], wanted)
        part = slices.find_part(open_weights("path", path).arrays["x"], weight)
        for dim in range(wanted.ndim):
            # With padding, and pieces of nothing else.
            rows = -(-wanted.shape[dim] // pieces)
            more = [(0, rows * pieces - n if d == dim else 0) for d, n in enumerate(wanted.shape)]
            padded = np.pad(wanted, more)
            indices = [
                tuple(
                    slice(k * rows, (k + 1) * rows) if d == dim else slice(0, n)
                    for d, n in enumerate(wanted.shape)
                )
                for k in range(pieces)
            ]
            found = slices.read_slices(
                ModelWeight("a", empty), slices.Parts([part], False), indices
            )
            for index, values in zip(indices, found, strict=True):
                np.testing.assert_array_equal(values, padded[index])


def test_a_fused_projection_is_split_and_joined_again(tmp_path: pathlib.Path) -> None:
    fused = np.random.default_rng(0).normal(size=(2, 12, 4)).astype(np.float32)
    arrays = {f"h.{i}.qkv.weight": fused[i] for i in range(2)}
    safetensors.numpy.save_file(arrays, tmp_path / "f.safetensors", {"format": "pt"})
    mapping = {
        f"layers/*/{name}": Weight("h.*.qkv.weight")[4 * k : 4 * k + 4].T.reshape(4, 2, 2)
        for k, name in enumerate(("query", "key", "value"))
    }
    params = {"layers": [{name: jnp.zeros((4, 2, 2)) for name in ("query", "key", "value")}] * 2}
    found = training.load_weights(params, tmp_path / "f.safetensors", mapping)
    for i, layer in enumerate(found["layers"]):
        for k, name in enumerate(("query", "key", "value")):
            wanted = fused[i, 4 * k : 4 * k + 4].T.reshape(4, 2, 2)
            np.testing.assert_array_equal(layer[name], wanted)
    again = tmp_path / "g.safetensors"
    training.export_weights(found, again, mapping, like=tmp_path / "f.safetensors")
    assert again.read_bytes() == (tmp_path / "f.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="like=FILE"):
        training.export_weights(found, tmp_path / "h.safetensors", mapping)


def test_scanned_layers_are_rows_of_one_array(tmp_path: pathlib.Path) -> None:
    arrays = {f"h.{i}.w": np.full((2, 3), i, np.float32) for i in range(5)}
    safetensors.numpy.save_file(arrays, tmp_path / "h.safetensors")
    mapping = {"w": [Weight(f"h.{i}.w").T for i in range(5)]}
    wanted = np.stack([arrays[f"h.{i}.w"].T for i in range(5)])
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    for dim in range(3):
        rules = partition.Rules([("w", partition.Shard(dim, pad=True))])
        empty = partition.place(strategy, {"w": jnp.zeros((5, 3, 2))}, rules)
        found = training.load_weights(empty, tmp_path / "h.safetensors", mapping)
        np.testing.assert_array_equal(np.asarray(found["w"]), wanted)
        training.export_weights(found, tmp_path / "i.safetensors", mapping)
        written = safetensors.numpy.load_file(tmp_path / "i.safetensors")
        assert written.keys() == arrays.keys()
        assert all(np.array_equal(written[name], arrays[name]) for name in arrays)


def test_a_name_with_a_star_takes_what_the_pattern_matched(tmp_path: pathlib.Path) -> None:
    arrays = {f"{a}.{b}": np.full(1, i, np.float32) for i, (a, b) in enumerate(_pairs())}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    params = {"a": {"0": {"p": jnp.zeros(1), "q": jnp.zeros(1)}, "1": {"p": jnp.zeros(1)}}}
    found = training.load_weights(params, tmp_path / "x.safetensors", {"a/*/{p,q}": "n*.*"})
    leaves = [float(x[0]) for x in jax.tree.leaves(found)]
    assert leaves == [0.0, 1.0, 2.0]


def _pairs() -> list[tuple[str, str]]:
    return [("n0", "p"), ("n0", "q"), ("n1", "p")]


def test_none_leaves_an_array_as_it_is(tmp_path: pathlib.Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    params = {"a": jnp.zeros(2), "head": {"kernel": jnp.full(3, 7.0)}}
    found = training.load_weights(params, tmp_path / "x.safetensors", {"head/**": None})
    assert [x.tolist() for x in jax.tree.leaves(found)] == [[1, 1], [7, 7, 7]]
    training.export_weights(found, tmp_path / "y.safetensors", {"head/**": None})
    assert safetensors.numpy.load_file(tmp_path / "y.safetensors").keys() == {"a"}


PARAMS = {"layers": {"0": {"w": np.zeros((2, 3), np.float32)}, "1": {"w": np.zeros((2, 3))}}}

WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no dict": ("x", ArgumentTypeError, "mapping is a dict"),
    "a key that is no text": ({3: "x"}, ArgumentTypeError, "A key is a pattern"),
    "an empty key": ({"/": "x"}, ArgumentTypeError, "A key is a pattern"),
    "a value that is no name": ({"w": 3}, ArgumentTypeError, "A value is a name"),
    "an empty name": ({"w": ""}, ArgumentTypeError, "A value is a name"),
    "an empty list": ({"w": []}, ArgumentError, "an array of the file for each row"),
    "a list of numbers": ({"w": [3]}, ArgumentTypeError, "A value is a name"),
    "a pattern without a match": ({"bias": "x"}, ArgumentError, "matches no array of the model"),
    "two patterns": ({"layers/*/w": "x.*", "0/w": "y"}, ArgumentError, "two patterns match"),
    "too few stars": ({"layers/*/w": "x"}, ArgumentError, "has 0 `\\*`, and the pattern has 1"),
    "too many stars": ({"0/w": "x.*", "1/w": "x"}, ArgumentError, "1 `\\*`, and the pattern has 0"),
}


@pytest.mark.parametrize(("mapping", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_mapping_is_named(
    mapping: Any, kind: type[Exception], text: str, tmp_path: pathlib.Path
) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    for call in (
        lambda: training.load_weights(PARAMS, tmp_path / "x.safetensors", mapping),
        lambda: training.export_weights(PARAMS, tmp_path / "new" / "y.safetensors", mapping),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("index", [[0, 1], "a", 1.5, True, slice(None, None, -1), slice("a")])
def test_an_index_that_reads_no_view_is_named(index: Any) -> None:
    with pytest.raises(ArgumentError, match="integers and slices with positive steps"):
        Weight("x")[index]


def test_a_weight_is_no_loop_and_shows_its_changes() -> None:
    weight = Weight("h.*.w")[:, 2:4, ..., None, 3].T.transpose(1, 0).reshape((2, -1))
    assert str(weight) == "Weight('h.*.w')[:, 2:4, ..., None, 3].T.transpose(1, 0).reshape(2, -1)"
    with pytest.raises(TypeError):
        list(weight)  # pyrefly: ignore
    with pytest.raises(ArgumentTypeError, match="shape are integers"):
        weight.reshape("a")  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"training.Weight"):
        Weight("")


_SEGMENTS = st.sampled_from(["a", "ab", "b", "0", "a.b", "x+y"])
_PATTERNS = st.sampled_from(["a", "ab", "b", "0", "*", "**", "?", "a*", "*b", "{a,b}", "{ab,0}"])


@settings(max_examples=examples(500, 20_000), deadline=None)
@given(
    st.booleans(),
    st.lists(_PATTERNS, min_size=1, max_size=4),
    st.lists(_SEGMENTS, min_size=1, max_size=4),
)
def test_a_pattern_matches_the_paths_that_it_matches_in_rules(
    anchored: bool, pattern: list[str], path: list[str]
) -> None:
    whole = "/" * anchored + "/".join(pattern)
    found = mapping_module._compile(whole).fullmatch("/".join(path)) is not None
    assert found == is_match(whole, "/".join(path))
