"""Rows that a step writes into values that are split over logical devices.

The oracle is the same function on one device, for the rows of each replica.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica, partition
from tests.tables import sampled

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda x, i: x.at[0].set(1.0),
    "set the last": lambda x, i: x.at[-1].set(jnp.arange(4.0)),
    "set at a traced row": lambda x, i: x.at[i].set(1.0),
    "set one in a list": lambda x, i: x.at[jnp.array([2])].set(1.0),
    "set two": lambda x, i: x.at[jnp.array([0, 3])].set(1.0),
    "set out of bounds": lambda x, i: x.at[i + 9].set(1.0, mode="drop"),
    "set a number": lambda x, i: x.at[1, 2].set(1.0),
    "set a column": lambda x, i: x.at[:, 1].set(1.0),
    "set a slice": lambda x, i: x.at[1:3].set(1.0),
    "add": lambda x, i: x.at[i].add(1.0),
    "multiply": lambda x, i: x.at[3].mul(2.0),
    "max": lambda x, i: x.at[3].max(0.3),
    "apply": lambda x, i: x.at[2].apply(jnp.sin),
    "gradient of a number": lambda x, i: jax.grad(lambda y: y[i, 2] ** 2)(x),
    "gradient of a row": lambda x, i: jax.grad(lambda y: (y[i] ** 2).sum())(x),
    "mapped": lambda x, i: jax.vmap(lambda y: y.at[1].set(1.0))(jnp.stack([x, 2 * x])),
    "in a loop": lambda x, i: jax.lax.fori_loop(0, 2, lambda n, y: y.at[n].set(1.0), x),
    "in a scan": lambda x, i: jax.lax.scan(lambda y, n: (y.at[n].add(1.0), n), x, jnp.arange(2))[0],
    "slice of a slice": lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (2, 4)).at[0].set(1.0),
}
MESHES = ((2, 2), (4, 2), (2, 4))
ROWS = list(itertools.product(WRITES, ("rows", "columns"), MESHES, ("auto", "explicit")))


def _make(shape: tuple[int, int], kind: str) -> jaxdist.Strategy:
    axis_type = AxisType.Auto if kind == "auto" else AxisType.Explicit
    mesh = jax.make_mesh(
        shape,
        ("data", "model"),
        axis_types=(axis_type,) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


@pytest.mark.parametrize("row", sampled(ROWS, 12, name=lambda row: "-".join(map(str, row))))
def test_rows_written_into_a_split_value_are_those_of_one_device(
    row: tuple[str, str, tuple[int, int], str],
) -> None:
    name, split, shape, kind = row
    strategy = _make(shape, kind)
    x = np.random.default_rng(0).normal(size=(shape[0], 4, 4)).astype("float32")
    rows = jax.device_put(x.reshape(-1, 4), strategy.per_replica_sharding)
    numbers = np.arange(shape[0], dtype="int32") % 3

    def step(x: Any, i: Any) -> Any:
        # In a step without `out_sharding` both kinds of meshes are Auto.
        value = partition.constrain(x, partition.Split(0 if split == "rows" else 1))
        return WRITES[name](value, i)

    got = strategy.run(step, (rows, PerReplica(list(numbers))))
    expected = [
        np.asarray(WRITES[name](jnp.asarray(a), jnp.asarray(i)))
        for a, i in zip(x, numbers, strict=True)
    ]
    for have, want in zip(strategy.experimental_local_results(got), expected, strict=True):
        np.testing.assert_allclose(np.asarray(have), want, rtol=1e-6)


@pytest.mark.parametrize("shape", MESHES)
def test_a_row_written_with_an_out_sharding_is_that_of_one_device(shape: tuple[int, int]) -> None:
    strategy = _make(shape, "explicit")
    x = np.random.default_rng(0).normal(size=(shape[0], 4, 4)).astype("float32")
    rows = jax.device_put(x.reshape(-1, 4), strategy.per_replica_sharding)

    def step(x: Any) -> Any:
        spec = P("model", None)
        return jax.sharding.reshard(x, spec).at[0].set(1.0, out_sharding=spec)

    x[:, 0] = 1.0
    for have, want in zip(
        strategy.experimental_local_results(strategy.run(step, (rows,))), x, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(have), want)


@pytest.mark.parametrize("name", ["set", "set a number"])
def test_rows_are_written_in_a_step_inside_of_jit(name: str) -> None:
    strategy = _make((2, 2), "auto")
    x = np.random.default_rng(0).normal(size=(2, 4, 4)).astype("float32")

    def step(x: Any) -> Any:
        return WRITES[name](partition.constrain(x, partition.Split(0)), jnp.int32(2))

    rows = jax.device_put(x.reshape(-1, 4), strategy.per_replica_sharding)
    got = jax.jit(lambda x: strategy.run(step, (PerReplica.of_global(x),)).array)(rows)
    expected = [np.asarray(WRITES[name](jnp.asarray(a), 2)) for a in x]
    np.testing.assert_allclose(np.asarray(got), np.concatenate(expected), rtol=1e-6)


def test_a_row_of_a_parameter_split_over_logical_devices_is_written() -> None:
    strategy = _make((2, 4), "auto")
    table = np.arange(32, dtype="float32").reshape(8, 4)
    rules = partition.Rules([], partition.Split(0))
    params = partition.place(strategy, {"table": table}, rules)
    new = strategy.run(lambda p: p["table"].at[5].set(0.0), (params,))
    table[5] = 0
    np.testing.assert_array_equal(np.asarray(new), table)
