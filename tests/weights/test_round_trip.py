"""Weights that go into a file and into another model are the same bits, in every placement."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import linen, nnx
from flax.core import meta

import jaxdist
from jaxdist import fit, partition, training
from tests.strategies_under_test import STRATEGIES, Row


class Net(nnx.Module):
    """Parameters, statistics, a variable of its own class, streams, and odd sizes."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embedding = nnx.Embed(11, 5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(5, 7, rngs=rngs), nnx.Linear(7, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.norm.mean[...] = jnp.full(5, float(seed))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = Scale(jnp.full((), float(seed)))


class Scale(nnx.Variable[jax.Array]):
    pass


def _read(model: Any) -> dict[str, np.ndarray]:
    state = nnx.state(model, nnx.Not(nnx.RngState))
    whole = partition.gather(state)
    flat = nnx.to_flat_state(whole)
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in flat}


def _assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def _list_placements(model: Any) -> list[str]:
    values = [x.get_raw_value() for _, x in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return [
        f"{x.held.sharding} {x.cut}" if isinstance(x, jaxdist.Sharded) else str(x.sharding)
        for x in values
    ]


RULES = {
    "whole": None,
    "pieces": partition.Rules([], otherwise=partition.Shard()),
    "pieces_along_dim_0": partition.Rules(
        [("norm/*", partition.Replicate())],
        otherwise=partition.Shard(0, pad=True),
    ),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: row.name)
def test_weights_are_the_same_bits_in_every_placement(
    row: Row, rules: partition.Rules | None, tmp_path: pathlib.Path
) -> None:
    if rules is not None and row.name.startswith("virtual"):
        pytest.skip("virtual replicas have no pieces")
    source, path = Net(3), tmp_path / "net.safetensors"
    training.export_weights(source, path)
    written = safetensors.numpy.load_file(path)
    _assert_equal(written, _read(source))
    strategy = row.make()
    with strategy.scope():
        model = Net(4)
    if rules is not None:
        partition.place(strategy, model, rules)
    placements = _list_placements(model)
    assert training.load_weights(model, path) is model
    _assert_equal(_read(model), written)
    assert _list_placements(model) == placements
    training.export_weights(model, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_step_uses_the_weights_that_were_loaded(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    training.export_weights(nnx.Linear(3, 5, rngs=nnx.Rngs(1)), tmp_path / "a.safetensors")
    wanted = nnx.Linear(3, 5, rngs=nnx.Rngs(1))
    model = nnx.Linear(3, 5, rngs=nnx.Rngs(2))
    partition.place(strategy, model, partition.Rules([], otherwise=partition.Shard()))
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)

    def step(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x)

    before = strategy.run(step, (model, x))
    training.load_weights(model, tmp_path / "a.safetensors")
    after = strategy.run(step, (model, x))
    np.testing.assert_allclose(
        strategy.experimental_local_results(after)[0], wanted(jnp.asarray(x)), rtol=1e-6
    )
    assert not np.allclose(
        strategy.experimental_local_results(before)[0],
        strategy.experimental_local_results(after)[0],
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int32",
        "int8",
        "uint8",
        "bool",
        "complex64",
    ],
)
def test_every_bit_of_a_dtype_comes_back(dtype: str, tmp_path: pathlib.Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(0).integers(0, 256, size=24 * kind.itemsize, dtype=np.uint8)
    values = (bits % 2 if dtype == "bool" else bits).view(kind).reshape(6, 4)
    training.export_weights({"x": jnp.asarray(values)}, tmp_path / "x.safetensors")
    for empty in (np.zeros((6, 4), kind), jnp.zeros((6, 4), kind)):
        found = training.load_weights({"x": empty}, tmp_path / "x.safetensors")
        assert np.asarray(found["x"]).tobytes() == values.tobytes()


def test_shapes_with_shardings_become_arrays(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    made = Net(1)
    training.export_weights(made, tmp_path / "net.safetensors")
    shapes = nnx.eval_shape(lambda: Net(0))
    rules = partition.Rules([], otherwise=partition.Shard())
    placed = partition.place(strategy, shapes, rules)
    training.load_weights(placed, tmp_path / "net.safetensors")
    _assert_equal(_read(placed), _read(made))
    kernel = placed.layers[0].kernel.get_raw_value()
    assert isinstance(kernel, jaxdist.Sharded)


def test_a_pytree_of_linen_with_boxes_keeps_them(tmp_path: pathlib.Path) -> None:
    dense = linen.Dense(
        3, kernel_init=linen.with_partitioning(linen.initializers.ones_init(), (None, "model"))
    )
    params = dense.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    training.export_weights(params, tmp_path / "d.safetensors")
    assert safetensors.numpy.load_file(tmp_path / "d.safetensors").keys() == {"bias", "kernel"}
    zeros = jax.tree.map(jnp.zeros_like, params)
    found = training.load_weights(zeros, tmp_path / "d.safetensors")
    assert isinstance(found["kernel"], meta.Partitioned)
    assert found["kernel"].names == (None, "model")
    np.testing.assert_array_equal(found["kernel"].value, np.ones((2, 3)))
    assert not np.any(zeros["kernel"].value)


def test_variables_of_a_strategy_get_the_values_on_all_replicas(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    with strategy.scope():
        variables = {"w": jaxdist.Variable(np.zeros((2, 3), np.float32))}
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    training.export_weights({"w": value}, tmp_path / "w.safetensors")
    found = training.load_weights(variables, tmp_path / "w.safetensors")
    assert found["w"] is variables["w"]
    for copy in strategy.experimental_local_results(variables["w"]):
        np.testing.assert_array_equal(copy, value)


def test_a_state_of_nnx_becomes_a_new_state(tmp_path: pathlib.Path) -> None:
    state = nnx.state(Net(1), nnx.Param)
    training.export_weights(state, tmp_path / "s.safetensors")
    other = nnx.state(Net(2), nnx.Param)
    found = training.load_weights(other, tmp_path / "s.safetensors")
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert not np.array_equal(jax.tree.leaves(other)[0], jax.tree.leaves(state)[0])


@pytest.mark.parametrize("most", [1, 100, 400, 10**9])
def test_a_folder_has_files_of_a_limited_size_and_an_index(
    most: int, tmp_path: pathlib.Path
) -> None:
    model = Net(1)
    # A folder with the files of another export.
    training.export_weights(model, tmp_path, max_shard_size=37)
    training.export_weights(model, tmp_path, max_shard_size=most)
    found = {
        file.name: safetensors.numpy.load_file(file) for file in tmp_path.glob("*.safetensors")
    }
    sizes = [[x.nbytes for x in arrays.values()] for arrays in found.values()]
    assert all(sum(size) <= most or len(size) == 1 for size in sizes)
    merged = {name: x for arrays in found.values() for name, x in arrays.items()}
    _assert_equal(merged, _read(model))
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(found) > 1)
    if len(found) > 1:
        where = json.loads(index.read_text())
        assert where["weight_map"] == {n: f for f, arrays in found.items() for n in arrays}
        assert where["metadata"]["total_size"] == sum(map(sum, sizes))
    other = Net(2)
    training.load_weights(other, tmp_path)
    _assert_equal(_read(other), _read(model))


def test_a_model_of_fit_exports_and_loads_by_name(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    with strategy.scope():
        one, two = Net(1), Net(2)
        first, second = fit.Model(one), fit.Model(two)
    first.export_weights(tmp_path / "m.safetensors")
    second.load_weights(tmp_path / "m.safetensors")
    by_name = second.get_weights(by_name=True)
    _assert_equal({name.replace("/", "."): x for name, x in by_name.items()}, _read(one))
    assert [x.tobytes() for x in second.get_weights()] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(one, nnx.Not(nnx.RngState)))
    ]
    by_name["scale"][...] = 17
    assert float(two.scale[...]) == 1


def test_weights_that_are_set_again_include_variables_of_own_classes() -> None:
    net = Net(1)
    model = fit.Model(net)
    weights = model.get_weights()
    net.scale[...] = jnp.float32(9)
    model.set_weights(weights)
    assert float(net.scale[...]) == 1
