"""Gradients of collectives: the gradient of an all-reduce is an all-reduce."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, Strategy
from tests.strategies.oracle import assert_each, per_replica

pytestmark = pytest.mark.both_executors


def _context() -> jaxdist.ReplicaContext:
    return jaxdist.get_replica_context()


def _weight() -> Any:
    return _context().replica_id_in_sync_group + 1.0


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _documented() -> PerReplica:
    return PerReplica([np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)])


def _loss(op: str) -> Callable[[Any], Any]:
    return lambda t: _weight() * _context().all_reduce(op, t * t).sum()


@pytest.mark.parametrize(
    ("op", "want"),
    [("SUM", [[6.0, 12.0], [18.0, 30.0]]), ("MEAN", [[3.0, 6.0], [9.0, 15.0]])],
)
def test_the_documented_gradients_of_all_reduce(two: Strategy, op: str, want: Any) -> None:
    assert_each(two, two.run(jax.grad(_loss(op)), (_documented(),)), want)


def test_the_documented_second_order_gradients(two: Strategy) -> None:
    def second(t: Any) -> Any:
        return jax.grad(lambda t: (t * jax.grad(_loss("SUM"))(t)).sum())(t)

    assert_each(two, two.run(second, (_documented(),)), [[12.0, 24.0], [36.0, 60.0]])


def test_an_all_reduce_of_an_all_reduce_counts_every_replica_twice(two: Strategy) -> None:
    def loss(t: Any) -> Any:
        inner = _context().all_reduce("SUM", t * t)
        return _weight() * _context().all_reduce("SUM", inner).sum()

    got = two.run(jax.grad(loss), (_documented(),))
    assert_each(two, got, [[12.0, 24.0], [36.0, 60.0]])


def test_results_that_the_loss_does_not_use_contribute_nothing(two: Strategy) -> None:
    def loss(t: Any) -> Any:
        used, _ = _context().all_reduce("SUM", (t * t, t * t * t))
        return _weight() * used.sum()

    assert_each(two, two.run(jax.grad(loss), (_documented(),)), [[6.0, 12.0], [18.0, 30.0]])


@pytest.mark.parametrize(
    ("op", "constants", "want"),
    [("SUM", [1.0, 3.0], [4.0, 4.0]), ("MEAN", [1.0, 3.0], [2.0, 2.0])],
)
def test_every_replicas_loss_flows_back_to_every_replica(
    two: Strategy, op: str, constants: list[float], want: list[float]
) -> None:
    def step(x: Any, c: Any) -> Any:
        return jax.grad(lambda x: _context().all_reduce(op, x) * c)(x)

    got = two.run(step, (PerReplica([5.0, 7.0]), PerReplica(constants)))
    assert_each(two, got, want)


@pytest.mark.parametrize(("op", "c"), [("SUM", 4.0), ("MEAN", 5.0)])
def test_with_one_device_the_gradient_is_that_of_the_identity(op: str, c: float) -> None:
    got = OneDeviceStrategy("cpu:0").run(
        lambda x, c: jax.grad(lambda x: _context().all_reduce(op, x) * c)(x), (1.0, c)
    )
    assert float(got) == c


def test_gradients_of_all_reduce_are_those_of_numpy_on_every_strategy(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(5).normal(size=(count, 3)).astype(np.float32)
    upstream = count * (count + 1) / 2
    got = strategy.run(
        lambda t: (jax.grad(_loss("SUM"))(t), jax.grad(_loss("MEAN"))(t)),
        (per_replica(strategy, lambda r: rows[r]),),
    )
    assert_each(strategy, got[0], list(2 * rows * upstream), rtol=1e-5)
    assert_each(strategy, got[1], list(2 * rows * upstream / count), rtol=1e-5)


def test_the_documented_gradients_of_all_gather(two: Strategy) -> None:
    t = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])

    def loss(t: Any) -> Any:
        return _weight() * (_context().all_gather(t, 0) * jnp.arange(1.0, 5.0)).sum()

    assert_each(two, two.run(jax.grad(loss), (t,)), [[3.0, 6.0], [9.0, 12.0]])


def test_gradients_of_all_gather_are_those_of_numpy_on_every_strategy(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    weights = np.random.default_rng(6).normal(size=(2, 3 * count)).astype(np.float32)
    upstream = count * (count + 1) / 2

    def loss(t: Any) -> Any:
        nested = _context().all_gather({"t": [t]}, 1)
        return _weight() * (nested["t"][0] * weights).sum()

    got = strategy.run(jax.grad(loss), (per_replica(strategy, lambda r: np.ones((2, 3), "f4")),))
    want = [weights[:, 3 * r : 3 * r + 3] * upstream for r in range(count)]
    assert_each(strategy, got, want, rtol=1e-5)


def test_forward_derivatives_of_all_reduce_are_all_reduced(two: Strategy) -> None:
    def step(x: Any) -> Any:
        return jax.jvp(lambda x: _context().all_reduce("SUM", x * x), (x,), (jnp.ones_like(x),))[1]

    assert_each(two, two.run(step, (_documented(),)), [[8.0, 14.0]] * 2)


@pytest.mark.parametrize("around", ["jit", "remat", "scan", "vmap"])
def test_gradients_are_the_same_under_jaxs_transformations(two: Strategy, around: str) -> None:
    inner = _loss("SUM")
    fn: dict[str, Callable[[Any], Any]] = {
        "jit": jax.jit(inner),
        "remat": jax.checkpoint(inner),
        "scan": lambda t: jax.lax.scan(lambda c, row: (c + inner(row[None]), 0), 0.0, t)[0],
        "vmap": lambda t: jax.vmap(lambda row: inner(row[None]))(t).sum(),
    }
    got = two.run(jax.grad(fn[around]), (_documented(),))
    assert_each(two, got, [[6.0, 12.0], [18.0, 30.0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("logical", [1, 2])
def test_gradients_keep_the_dtype_of_their_value(dtype: str, logical: int) -> None:
    devices = np.asarray(jax.devices()[: 2 * logical], dtype=object).reshape(2, logical)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    strategy = MirroredStrategy(mesh=mesh, replica_axes="data")
    t = PerReplica([jnp.asarray([1, 2], dtype), jnp.asarray([3, 5], dtype)])

    def step(t: Any) -> Any:
        return jax.grad(lambda t: _loss("SUM")(t).astype("float32"))(t)

    got = strategy.run(step, (t,))
    assert str(got.values[0].dtype) == dtype
    for have, want in zip(got.values, [[6.0, 12.0], [18.0, 30.0]], strict=True):
        np.testing.assert_allclose(np.asarray(have, np.float32), want)


def test_the_gradient_of_assume_replicated_is_the_identity_and_may_differ(two: Strategy) -> None:
    def loss(t: Any) -> Any:
        same = jaxdist.assume_replicated(_context().all_reduce("SUM", t) * 0)
        return ((same + jaxdist.assume_replicated(t)) * _weight()).sum()

    got = two.run(jax.grad(loss), (_documented(),))
    assert isinstance(got, PerReplica)
    assert_each(two, got, [[1.0, 1.0], [2.0, 2.0]])


def test_assume_replicated_makes_a_result_plain_and_maps_structures(two: Strategy) -> None:
    def step(x: Any) -> Any:
        return jaxdist.assume_replicated({"a": x * 0, "b": [x * 0 + 1]})

    for fn in (step, jax.jit(step), jax.vmap(step)):
        got = two.run(fn, (_documented(),))
        assert isinstance(got["a"], jax.Array)
        assert got["b"][0].tolist() == [1, 1]
