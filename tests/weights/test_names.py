"""All arrays of a model or a file without a counterpart are in one error, and nothing changes."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

from jaxdist import fit, training
from jaxdist.errors import ArgumentError, ArgumentTypeError, CheckpointError

Weight = training.Weight


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    arrays = {
        "a.kernel": np.ones((2, 3), np.float32),
        "b.kernel": np.ones((4, 4), np.float32),
        "c.bias": np.ones(5, np.int32),
        "extra": np.ones(1, np.float32),
        "c.bais": np.ones(5, np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_unknown_missing_and_ill_shaped_names_are_in_one_error(path: pathlib.Path) -> None:
    model = {
        "a": {"kernel": jnp.zeros((3, 2))},
        "b": {"kernel": jnp.zeros((4, 4))},
        "c": {"bias": jnp.zeros(5), "bases": jnp.zeros(5)},
    }
    with pytest.raises(CheckpointError) as caught:
        training.load_weights(model, path)
    text = str(caught.value)
    for line in (
        "training.load_weights: 5 array(s)",
        "a/kernel: [3, 2], and Weight('a.kernel') is [2, 3]: add .T",
        "c/bias: float32, and Weight('c.bias') is int32",
        "c/bases: the file has no 'c.bases'; the nearest name is 'c.bias'",
        "Not used of the file: c.bais, extra.",
        "mapping={'c/bases': 'c.bais'}",
        "ignore=['c.bais']",
    ):
        assert line in text, text
    assert not any(np.any(x) for x in jax.tree.leaves(model))


def test_the_error_of_a_model_of_fit_names_its_method(path: pathlib.Path) -> None:
    model = fit.Model(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    before = model.get_weights()
    with pytest.raises(CheckpointError, match=r"^fit.Model.load_weights: 7 array\(s\)"):
        model.load_weights(path)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"w": Weight("b.kernel")[:, 7]}, "index 7 is out of bounds"),
        ({"w": Weight("b.kernel").reshape(3, 5)}, "cannot reshape array of size 16"),
        ({"w": Weight("b.kernel").transpose(0, 2)}, "axis 2 is out of bounds"),
        ({"w": Weight("b.kernel")[0, 0, 0]}, "too many indices"),
        ({"w": ["b.kernel", "a.kernel"]}, r"have the shapes \[\[4, 4\], \[2, 3\]\]"),
    ],
)
def test_a_change_that_does_not_fit_the_shape_is_named(
    path: pathlib.Path, mapping: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        training.load_weights({"w": jnp.zeros((4, 4))}, path, mapping, ignore=["*"])


def test_ignored_names_match_by_stars(path: pathlib.Path) -> None:
    model = {"extra": jnp.zeros(1)}
    found = training.load_weights(model, path, ignore=["?.kernel", "*.kernel", "c.*"])
    assert found["extra"].tolist() == [1.0]
    with pytest.raises(CheckpointError, match=r"Not used of the file: a\.kernel, b\.kernel"):
        training.load_weights(model, path, ignore=["c.*", "kernel"])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.float32(1e30), "float16"),
        (np.float32(500), ml_dtypes.float8_e4m3fn),
        (np.float64(1e300), "float32"),
        (np.int32(300), "int8"),
        (np.int64(-1), "uint32"),
        (np.uint8(200), "int8"),
    ],
)
def test_a_number_that_a_dtype_does_not_have_is_an_error(
    value: Any, dtype: Any, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": np.asarray([0, value], value.dtype)}, file)
    model = {"x": np.zeros(2, dtype)}
    with pytest.raises(CheckpointError, match=r"^x cannot be converted from .* to "):
        training.load_weights(model, file)


def test_numbers_are_rounded_to_the_dtype_of_the_model(tmp_path: pathlib.Path) -> None:
    values = np.asarray([1.00390625, np.inf, -np.inf, np.nan, 1e-9], np.float32)
    safetensors.numpy.save_file({"x": values}, tmp_path / "x.safetensors")
    for dtype in (jnp.bfloat16, jnp.float16, np.float32):
        found = training.load_weights({"x": jnp.zeros(5, dtype)}, tmp_path / "x.safetensors")
        wanted = values.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(found["x"]).astype(np.float32), wanted)


def test_an_export_names_all_arrays_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    model = {
        "a": jnp.zeros((2, 3)),
        "b": jnp.zeros(2, jnp.int4),
        "c": jax.ShapeDtypeStruct((2,), jnp.float32),
        "d": jnp.zeros(2),
        "e": jnp.zeros(2),
    }
    mapping = {"a": Weight("x").reshape(3, 2), "d": "same", "e": "same"}
    with pytest.raises(CheckpointError) as caught:
        training.export_weights(model, tmp_path / "new" / "x.safetensors", mapping)
    for line in (
        "training.export_weights: 4 array(s)",
        "c: it has only a shape",
        "x: Weight('x').reshape(3, 2) of an unknown shape",
        "b: b is int4",
        "same: d and e are parts of it",
    ):
        assert line in str(caught.value), caught.value
    assert not (tmp_path / "new").exists()


def test_an_export_like_a_file_names_what_is_not_covered(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = {"p": jnp.zeros((2, 4)), "q": jnp.zeros((2, 4)), "r": jnp.zeros(2), "s": jnp.zeros(3)}
    kernel = Weight("b.kernel")
    new = tmp_path / "new.safetensors"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"p": kernel[:2], "q": kernel[1:3]}, "b.kernel: p and q are not all of its elements"),
        ({"p": kernel[:2], "q": None}, "b.kernel: p are not all of its elements, each once"),
        ({"p": kernel[:3], "q": None}, r"p is \[2, 4\], and Weight\('b.kernel'\)\[:3\] is \[3, 4"),
        ({"p": "none", "q": None}, "none: like has no array of this name, and p is written to it"),
        ({"p": kernel[:, :, 1], "q": None}, "too many indices"),
        ({"p": None, "q": None}, "b.kernel: no array of the model is written to it"),
    ]
    for mapping, text in cases:
        with pytest.raises(CheckpointError, match=text):
            training.export_weights(model, new, {"r": None, "s": None, **mapping}, like=path)
    assert not new.exists()
    mapping = {"p": kernel[:2], "q": kernel[2:], "r": None, "s": None}
    training.export_weights(model, new, mapping, like=path, ignore=["a.*", "c.*", "extra"])
    found = safetensors.numpy.load_file(new)
    assert {name: x.shape for name, x in found.items()} == {"b.kernel": (4, 4)}


def test_a_model_without_weights_is_refused(tmp_path: pathlib.Path) -> None:
    for model in ({}, {"a": "text"}, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), {"k": jax.random.key(0)}):
        with pytest.raises(ArgumentError, match="in which no array is a weight"):
            training.export_weights(model, tmp_path / "x.safetensors")


def test_streams_caches_and_intermediates_are_no_weights(tmp_path: pathlib.Path) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.rngs = nnx.Rngs(0)
            self.w = nnx.Param(jnp.ones(2))
            self.seen = nnx.Intermediate(jnp.ones(3))
            self.cache = nnx.Cache(jnp.ones(4))

    net = Net()
    training.export_weights({"net": net, "state": nnx.state(net)}, tmp_path / "x.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"net.w", "state.w"}


def test_two_arrays_with_one_path_or_name_are_refused(tmp_path: pathlib.Path) -> None:
    model = {"a/b": np.ones(2), "a": {"b": np.zeros(2)}}
    with pytest.raises(ArgumentError, match="two arrays at the path a/b"):
        training.export_weights(model, tmp_path / "x.safetensors")
    safetensors.numpy.save_file({"a.b": np.ones(2)}, tmp_path / "x.safetensors")
    other = {"a.b": np.zeros(2), "a": {"b": np.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"a\.b has the name 'a\.b', too|a/b has the name"):
        training.load_weights(other, tmp_path / "x.safetensors")


@pytest.mark.parametrize("value", [0.5, 3, True, 1j, [1.0], {"x": 1.0}])
def test_values_that_are_not_arrays_are_not_left_out(value: Any, tmp_path: pathlib.Path) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2))
            self.other = nnx.Param(value)

    with pytest.raises(ArgumentTypeError, match="at other"):
        training.export_weights(Net(), tmp_path / "x.safetensors")


def test_a_ref_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ArgumentTypeError, match="model at w"):
        training.export_weights({"w": jax.new_ref(jnp.ones(2))}, tmp_path / "x.safetensors")


def test_states_of_optimizers_are_no_weights(tmp_path: pathlib.Path) -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    training.export_weights([model, optimizer], tmp_path / "x.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"0.bias", "0.kernel"}


@pytest.mark.parametrize(
    ("dtype", "like"), [("float32", "bool"), ("complex64", "float32"), ("int32", "float32")]
)
def test_another_kind_of_numbers_is_refused_for_like(
    dtype: str, like: str, tmp_path: pathlib.Path
) -> None:
    safetensors.numpy.save_file({"x": np.zeros(3, like)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"x is {dtype}, and the array of like {like}"):
        training.export_weights(
            {"x": np.ones(3, dtype)}, tmp_path / "y.safetensors", like=tmp_path / "x.safetensors"
        )


def test_ignore_needs_like_and_leaves_out(tmp_path: pathlib.Path) -> None:
    model = {"a": np.ones(2), "b": np.ones(3)}
    with pytest.raises(ArgumentError, match=r"ignore=\['b'\] without like"):
        training.export_weights(model, tmp_path / "x.safetensors", ignore=["b"])
    training.export_weights(model, tmp_path / "x.safetensors")
    path = tmp_path / "y.safetensors"
    training.export_weights(model, path, like=tmp_path / "x.safetensors", ignore=["b"])
    assert safetensors.numpy.load_file(path).keys() == {"a"}


@pytest.mark.parametrize("dims", [(-1, 0, 1), (1, -1, 0), (2, 0, 1)])
def test_every_order_of_dims_is_inverted(dims: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    file = np.arange(24.0).reshape(2, 3, 4)
    mapping = {"x": Weight("w").transpose(*dims)}
    model = {"x": np.ascontiguousarray(file.transpose(dims))}
    training.export_weights(model, tmp_path / "x.safetensors", mapping)
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(tmp_path / "x.safetensors")["w"], file
    )


def test_an_order_that_is_no_permutation_is_named(tmp_path: pathlib.Path) -> None:
    for dims in ((0, 0), (0, 1, 2), (0,)):
        with pytest.raises(CheckpointError, match=r"transpose\(.*\) of an array of 2 dims"):
            training.export_weights(
                {"x": np.ones((2, 3))}, tmp_path / "x", {"x": Weight("w").transpose(*dims)}
            )


@pytest.mark.parametrize("size", [8, 1 << 20])
def test_64_bits_stay_64_bits(size: int, tmp_path: pathlib.Path) -> None:
    values = np.full(size, 1 + 1e-12)
    training.export_weights({"x": values}, tmp_path / "x.safetensors")
    with jax.enable_x64(True):
        empty = {"x": jnp.zeros(size, "float64")}
        placed = {"x": jax.device_put(empty["x"], jax.devices()[1])}
        for model in (empty, placed):
            found = training.load_weights(model, tmp_path / "x.safetensors")
            np.testing.assert_array_equal(np.asarray(found["x"]), values)
    shape = {"x": jax.ShapeDtypeStruct((size,), np.dtype("float64"))}
    with pytest.raises(CheckpointError, match="JAX has made float32 of it"):
        training.load_weights(shape, tmp_path / "x.safetensors")


def test_shapes_on_an_abstract_mesh_are_refused(tmp_path: pathlib.Path) -> None:
    training.export_weights({"x": np.ones(4, np.float32)}, tmp_path / "x.safetensors")
    mesh = jax.sharding.AbstractMesh((4,), ("a",))
    place = jax.NamedSharding(mesh, jax.P("a"))
    model = {"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place)}
    with pytest.raises(ArgumentError, match="x on an abstract mesh"):
        training.load_weights(model, tmp_path / "x.safetensors")
