"""Parameters in pieces in steps whose logical axes are Explicit, against one device without a mesh.

The same steps on virtual replicas, and in two processes.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import get_replica_context, partition
from jaxdist.testing import launch
from tests.tables import sampled

Params = dict[str, Any]
STEPS = 3
_RANDOM = np.random.default_rng(0)
X, Y = _RANDOM.normal(size=(2, 16, 8)).astype("float32")
WEIGHTS = {
    "first": _RANDOM.normal(size=(8, 16)).astype("float32") / 3,
    "second": _RANDOM.normal(size=(16, 8)).astype("float32") / 4,
}


def _whole(params: Params, x: Any) -> Any:
    return jax.nn.relu(x @ params["first"]) @ params["second"]


def _out_sharding(params: Params, x: Any) -> Any:
    spec = P("data", "model")
    hidden = jax.nn.relu(jnp.einsum("bi,io->bo", x, params["first"], out_sharding=spec))
    return jnp.einsum("bi,io->bo", hidden, params["second"], out_sharding=P("data", None))


def _reshard(params: Params, x: Any) -> Any:
    first = jax.sharding.reshard(params["first"], P(None, "model"))
    second = jax.sharding.reshard(params["second"], P(None, None))
    return jax.sharding.reshard(jax.nn.relu(x @ first), P("data", None)) @ second


def _gathered(params: Params, x: Any) -> Any:
    return _reshard(partition.gather(params), x)


MODELS: dict[str, Callable[[Params, Any], Any]] = {
    "out_sharding": _out_sharding,
    "reshard": _reshard,
    "gathered": _gathered,
}
PLACEMENTS = {
    "whole": partition.Replicate(),
    "split": partition.Split(1),
    "fsdp": partition.Shard(),
    "fsdp over rows": partition.Shard(0),
    "fsdp over columns": partition.Shard(1),
    "fsdp with split": partition.Shard(0, split=1),
    "hsdp": partition.Shard(0, axes=("data",)),
    "hsdp with split": partition.Shard(0, split=1, axes=("data",)),
}
AXES = ("slice", "data", "model")
ROWS = list(itertools.product(MODELS, PLACEMENTS, ("sgd", "adam")))


def _loss(model: Callable[[Params, Any], Any], params: Params, x: Any, y: Any) -> Any:
    return ((model(params, x) - y) ** 2).mean()


def _make_optimizer(name: str) -> optax.GradientTransformation:
    return optax.sgd(0.1) if name == "sgd" else optax.adam(0.01)


def _train(strategy: jaxdist.Strategy, model: str, placement: str, optimizer: str) -> list[float]:
    tx = _make_optimizer(optimizer)
    rules = partition.Rules([], otherwise=PLACEMENTS[placement])
    params = partition.place(strategy, WEIGHTS, rules)
    state = tx.init(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        context = get_replica_context()
        loss, grads = jax.value_and_grad(lambda p: _loss(MODELS[model], p, x, y))(params)
        updates, state = tx.update(context.all_reduce("mean", grads), state, params)
        return optax.apply_updates(params, updates), state, context.all_reduce("mean", loss)

    own = slice(None)
    if jax.process_count() > 1:
        size = len(X) // jax.process_count()
        own = slice(jax.process_index() * size, (jax.process_index() + 1) * size)
    place = jax.make_array_from_process_local_data
    x, y = (place(strategy.per_replica_sharding, a[own]) for a in (X, Y))
    losses = []
    for _ in range(STEPS):
        params, state, loss = strategy.run(step, (params, state, x, y))
        losses.append(float(loss))
    return losses


def _train_on_one_device(optimizer: str) -> list[float]:
    tx = _make_optimizer(optimizer)
    params: Any = jax.tree.map(jnp.asarray, WEIGHTS)
    state, losses = tx.init(params), []
    for _ in range(STEPS):
        loss, grads = jax.value_and_grad(lambda p: _loss(_whole, p, X, Y))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def _make(shape: tuple[int, ...] = (2, 2, 2)) -> jaxdist.Strategy:
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * 3, devices=devices)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("slice", "data"))


@pytest.mark.parametrize("row", sampled(ROWS, 5, name=" / ".join))
def test_parameters_in_pieces_train_in_a_step_with_types_as_on_one_device(
    row: tuple[str, str, str],
) -> None:
    losses = _train(_make(), *row)
    np.testing.assert_allclose(losses, _train_on_one_device(row[-1]), rtol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_in_pieces_train_op_by_op_with_layouts(model: str, placement: str) -> None:
    with jaxdist.config.run_eagerly(True):
        losses = _train(_make(), model, placement, "sgd")
    np.testing.assert_allclose(losses, _train_on_one_device("sgd"), rtol=2e-5)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_virtual_replicas_have_the_same_bits_with_layouts_over_their_axis(
    kind: AxisType, count: int
) -> None:
    def step(x: Any) -> Any:
        loss = lambda w: (jnp.dot(x, w, out_sharding=P("data", None)) ** 2).mean()  # noqa: E731
        grad = jax.grad(loss)(jnp.asarray(WEIGHTS["first"]))
        kept = jax.lax.with_sharding_constraint(grad, P("data", None))
        return get_replica_context().all_reduce("mean", kept)

    def run(count: int, kind: AxisType) -> np.ndarray:
        mesh = jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=jax.devices()[:count])
        strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",), deterministic=8)
        return np.asarray(strategy.run(step, (jax.device_put(X, strategy.per_replica_sharding),)))

    expected = jax.grad(lambda w: ((X @ w) ** 2).mean())(jnp.asarray(WEIGHTS["first"]))
    got = run(count, kind)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got, run(4, AxisType.Auto))


def _train_in_a_process() -> tuple[list[float], list[str]]:
    import logging

    import jax
    import jax.numpy as jnp

    import jaxdist
    from jaxdist import partition
    from tests.partition import test_explicit_meshes as table

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    logging.getLogger("jaxdist").addHandler(Kept())
    logging.getLogger("jaxdist").setLevel(logging.INFO)
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    spec = jax.P(strategy.mesh.axis_names[0], None)

    def model(params: Any, x: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ params["first"]), spec)
        return jnp.dot(hidden, params["second"], out_sharding=spec)

    table.MODELS["over processes"] = model
    table.PLACEMENTS["over processes"] = partition.Shard()
    losses = table._train(strategy, "over processes", "over processes", "sgd")
    return losses, [line for line in lines if "in a layout" in line]


@pytest.mark.slow
def test_two_processes_train_with_layouts_over_their_replicas_as_one_device() -> None:
    results = launch(_train_in_a_process, 2, devices_per_process=2, timeout_seconds=200)
    for losses, _ in results:
        np.testing.assert_allclose(losses, _train_on_one_device("sgd"), rtol=2e-5)
    # One process says it for all.
    assert [len(lines) for _, lines in results] == [1, 0]
