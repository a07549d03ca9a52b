"""Operations along a dim that is split over an Explicit axis: right, or a named error.

The oracle is the same function under `jax.vmap` on one device, whose axis has the replica's name.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica, partition
from jaxdist.errors import UnsupportedError
from tests.strategies.oracle import refused
from tests.tables import sampled

REPLICAS = 2
X = np.random.default_rng(0).normal(size=(REPLICAS * 4, 4, 4)).astype("float32")

Operation = Callable[[Any, int], Any]

# JAX has rules for these along every dim.
WITH_RULES: dict[str, Operation] = {
    "psum": lambda x, d: lax.psum(x, "data"),
    "pmax": lambda x, d: lax.pmax(x, "data"),
    "all_gather in place": lambda x, d: lax.all_gather(x, "data", axis=d, tiled=True),
    "all_to_all": lambda x, d: lax.all_to_all(x, "data", d, (d + 1) % 3, tiled=True),
    "ppermute": lambda x, d: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    "number of the replica": lambda x, d: x + lax.axis_index("data"),
    "sum": lambda x, d: x.sum(d),
    "max": lambda x, d: x.max(d),
    "argmax": lambda x, d: jnp.argmax(x, axis=d),
    "softmax": lambda x, d: jax.nn.softmax(x, axis=d),
    "slice": lambda x, d: lax.slice_in_dim(x, 0, 2, axis=d),
    "concatenate": lambda x, d: jnp.concatenate([x, x], axis=d),
    "stack": lambda x, d: jnp.stack([x, x], axis=d),
    "split": lambda x, d: jnp.split(x, 2, axis=d)[0],
    "transpose": lambda x, d: x.T,
    "vmap": lambda x, d: jax.vmap(lambda y: y * 2, in_axes=d)(x),
    "cond": lambda x, d: lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, x),
    "loop": lambda x, d: lax.fori_loop(0, 3, lambda _, y: y * 2, x),
    "remat": lambda x, d: jax.grad(lambda y: jax.checkpoint(jnp.sin)(y).sum())(x),
    "grad": lambda x, d: jax.grad(lambda y: (jnp.sin(y) ** 2).sum())(x),
    "constrain": lambda x, d: partition.constrain(x * 2, partition.Split(d)),
    "constrain another dim": lambda x, d: partition.constrain(x, partition.Split((d + 1) % 3)),
    "constrain to whole": lambda x, d: partition.constrain(x * 2, partition.Replicate()),
}
# JAX refuses these along a split dim today.
REFUSED: dict[str, Operation] = {
    "psum_scatter": lambda x, d: lax.psum_scatter(x, "data", scatter_dimension=d, tiled=True),
    "all_gather": lambda x, d: lax.all_gather(x, "data", axis=d),
    "sort": lambda x, d: jnp.sort(x, axis=d),
    "argsort": lambda x, d: jnp.argsort(x, axis=d),
    "median": lambda x, d: jnp.median(x, axis=d),
    "cumsum": lambda x, d: jnp.cumsum(x, axis=d),
    "cummax": lambda x, d: lax.cummax(x, axis=d),
    "top_k": lambda x, d: lax.top_k(jnp.moveaxis(x, d, -1), 2)[0],
    "row": lambda x, d: jnp.moveaxis(x, d, 0)[0],
    "rows": lambda x, d: jnp.take(x, jnp.array([0, 1]), axis=d),
    "set": lambda x, d: jnp.moveaxis(x, d, 0).at[0].set(1.0),
    "roll": lambda x, d: jnp.roll(x, 1, d),
    "repeat": lambda x, d: jnp.repeat(x, 2, axis=d),
    "reshape": lambda x, d: jnp.moveaxis(x, d, -1).reshape(-1),
    "scan": lambda x, d: lax.map(lambda y: y * 2, jnp.moveaxis(x, d, 0)),
    "contraction": lambda x, d: jnp.einsum("abc,abd->acd", x, jnp.moveaxis(x, d, 1)),
    "convolution": lambda x, d: lax.conv_general_dilated(x, x, (1,), "SAME"),
    "searchsorted": lambda x, d: jnp.searchsorted(jnp.arange(4.0), x),
    "constraint": lambda x, d: lax.with_sharding_constraint(x * 2, _split(d)),
}
OPERATIONS = {**WITH_RULES, **REFUSED}
ROWS = list(itertools.product(OPERATIONS, (0, 1, 2), ("compiled", "op by op")))


def _split(dim: int) -> P:
    return P(*("model" if d == dim else None for d in range(3)))


def _make() -> jaxdist.Strategy:
    mesh = jax.make_mesh(
        (REPLICAS, 2),
        ("data", "model"),
        axis_types=(AxisType.Explicit,) * 2,
        devices=jax.devices()[: 2 * REPLICAS],
    )
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _run(fn: Callable[[Any], Any], strategy: jaxdist.Strategy | None = None) -> np.ndarray:
    strategy = strategy or _make()
    rows = jax.device_put(X, strategy.per_replica_sharding)
    got = strategy.run(fn, (rows,))
    values = got.values if isinstance(got, PerReplica) else [got] * REPLICAS
    return np.stack([np.asarray(v) for v in values])


def _find_expected(name: str, dim: int) -> np.ndarray:
    fn = OPERATIONS[name]
    if name == "constraint":
        return X.reshape(REPLICAS, 4, 4, 4) * 2
    rows = jnp.asarray(X.reshape(REPLICAS, 4, 4, 4))
    return np.asarray(jax.vmap(lambda x: fn(x, dim), axis_name="data")(rows))


@pytest.mark.parametrize("row", sampled(ROWS, 20, name=lambda row: "-".join(map(str, row))))
def test_an_operation_along_a_split_dim_is_right_or_a_named_error(
    row: tuple[str, int, str],
) -> None:
    name, dim, executor = row
    try:
        with jaxdist.config.run_eagerly(executor == "op by op"):
            got = _run(lambda x: OPERATIONS[name](jax.sharding.reshard(x, _split(dim)), dim))
    except UnsupportedError as error:
        assert name in REFUSED
        assert executor == "compiled"
        # JAX names no line for an error in a branch of a jitted function of its own.
        line = __file__ if name != "searchsorted" else "at "
        assert all(word in str(error) for word in ("<lambda>", line, "Explicit", "reshard"))  # noqa: PT017
        return
    np.testing.assert_allclose(got, _find_expected(name, dim), rtol=1e-5, atol=1e-5)


TOGETHER = [row for row in itertools.product(REFUSED, (0, 1, 2)) if row[0] != "constraint"]


@pytest.mark.parametrize("row", sampled(TOGETHER, 4, name=lambda row: "-".join(map(str, row))))
def test_the_way_that_the_error_names_is_right(row: tuple[str, int]) -> None:
    name, dim = row

    def step(x: Any) -> Any:
        return OPERATIONS[name](
            jax.sharding.reshard(jax.sharding.reshard(x, _split(dim)), P()), dim
        )

    np.testing.assert_allclose(_run(step), _find_expected(name, dim), rtol=1e-5, atol=1e-5)


def test_a_constraint_in_a_step_with_types_says_to_reshard() -> None:
    def step(x: Any) -> Any:
        return lax.with_sharding_constraint(jax.sharding.reshard(x, _split(1)), _split(2))

    with refused(UnsupportedError, "'step'", "jax.sharding.reshard(x, spec)", "constrain"):
        _run(step)


def test_an_error_of_the_step_itself_stays_what_it_is() -> None:
    def step(x: Any) -> Any:
        jax.sharding.reshard(x, _split(1))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        _run(step)


def test_constrain_splits_the_type_of_a_value_in_a_step_with_types() -> None:
    types: list[str] = []

    def step(x: Any) -> Any:
        y = partition.constrain(jax.sharding.reshard(x, _split(1)), partition.Split(2))
        types.append(str(jax.typeof(y)))
        return y

    np.testing.assert_array_equal(_run(step), X.reshape(REPLICAS, 4, 4, 4))
    assert types[-1] == "float32[4,4,4@model]"
