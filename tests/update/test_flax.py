"""Flax objects with a sharded update: NNX optimizers in place, Linen train states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxdist
from jaxdist import Sharded
from jaxdist.training import Checkpoints
from tests.program.run.counting import compilations

pytestmark = pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")


class Net(nnx.Module):
    """A kernel that eight replicas divide, and one that they do not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(16, 24, rngs=rngs)
        self.outer = nnx.List([nnx.Linear(24, 5, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: jax.Array = self.outer[0](jnp.tanh(self.inner(x)))
        return hidden


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(48, 16)).astype("float32"),
        rng.normal(size=(48, 5)).astype("float32"),
    )


class Training:
    """An NNX model and its optimizer, updated in place."""

    def __init__(self, count: int) -> None:
        self.strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        with self.strategy.scope():
            self.net = Net(nnx.Rngs(0))
            tx = jaxdist.sharded_update(optax.adamw(1e-2), min_bytes=0)
            self.optimizer = nnx.Optimizer(self.net, tx, wrt=nnx.Param)
        self.batch = jax.device_put(rows(), self.strategy.per_replica_sharding)

    @staticmethod
    def step(net: Net, optimizer: nnx.Optimizer[Net], batch: Any) -> jax.Array:
        x, y = batch
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - y)))(net)
        optimizer.update(net, grads)
        mean: jax.Array = jaxdist.get_replica_context().all_reduce("mean", loss)
        return mean

    def run(self, steps: int, **how: Any) -> list[float]:
        options = jaxdist.RunOptions(**how) if how else None
        args = (self.net, self.optimizer, self.batch)
        return [float(self.strategy.run(self.step, args, options=options)) for _ in range(steps)]

    def state(self) -> Any:
        return nnx.state((self.net, self.optimizer))


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    return Training(1).run(6)


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_nnx_optimizer_is_updated_in_place_in_one_compilation(
    wanted: list[float], donated: tuple[int, ...]
) -> None:
    training = Training(8)
    with compilations() as count:
        losses = training.run(4, donate_argnums=donated) if donated else training.run(4)
    assert losses == pytest.approx(wanted[:4], rel=1e-5)
    assert count.number == 1
    moments: Any = training.optimizer.opt_state[0].mu
    for kernel in (moments.inner.kernel, moments.outer[0].kernel):
        held = kernel.get_raw_value()
        assert isinstance(held, Sharded)
        assert held.array.addressable_shards[0].data.size == held.array.size // 8
    assert int(training.optimizer.step[...]) == 4


def test_gradients_of_a_sharded_update_can_be_checked() -> None:
    training = Training(3)
    args = (training.net, training.optimizer, training.batch)
    report = training.strategy.check_gradients(training.step, args)
    assert report.is_equal, report


def test_two_updates_in_one_step(wanted: list[float]) -> None:
    training = Training(2)

    def twice(*args: Any) -> Any:
        return training.step(*args), training.step(*args)

    found = training.strategy.run(twice, (training.net, training.optimizer, training.batch))
    assert [float(x) for x in found] == pytest.approx(wanted[:2], rel=1e-5)


@pytest.mark.slow
def test_nnx_optimizer_op_by_op(wanted: list[float]) -> None:
    training = Training(2)
    jaxdist.config.run_eagerly(True)
    try:
        losses = training.run(2)
    finally:
        jaxdist.config.run_eagerly(False)
    assert losses == pytest.approx(wanted[:2], rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 8), (8, 3), (1, 3)])
def test_checkpoint_is_restored_on_other_replicas(
    tmp_path: Any, wanted: list[float], before: int, after: int
) -> None:
    first = Training(before)
    first.run(2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, first.state(), {})
        second = Training(after)
        nnx.update(
            (second.net, second.optimizer), checkpoints.restore(2, like=second.state()).state
        )
    losses = second.run(1)
    with compilations() as count:
        losses += second.run(2)
    assert losses == pytest.approx(wanted[2:5], rel=1e-5)
    assert count.number == 0


def test_restored_state_lies_as_it_was_asked_for(tmp_path: Any) -> None:
    training = Training(8)
    tx = jaxdist.sharded_update(optax.adam(1e-2), min_bytes=0)
    params = {"even": np.ones((16, 3), "float32"), "uneven": np.ones(13, "float32")}
    with training.strategy.scope():
        state: Any = tx.init(params)
    state = jax.tree.map(lambda x: x + 1, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        restored: Any = checkpoints.restore(
            0, like=state, sharding=training.strategy.replicated_sharding
        ).state
    for name in params:
        one, other = state[0].mu[name], restored[0].mu[name]
        assert (other.dim, other.size) == (one.dim, one.size)
        assert other.array.sharding.is_equivalent_to(one.array.sharding, one.ndim)
        np.testing.assert_array_equal(other.whole(), one.whole())
    assert restored[0].count.is_fully_replicated


def test_linen_train_state() -> None:
    x, y = rows()
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(16, 5)), "float32"), "b": jnp.zeros(5)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(batch[0] @ params["w"] + params["b"][None] - batch[1]))

    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        loss = jaxdist.get_replica_context().all_reduce("mean", loss)
        return state.apply_gradients(grads=grads), loss

    losses: dict[int, list[float]] = {1: [], 8: []}
    for count, found in losses.items():
        strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        tx = jaxdist.sharded_update(optax.adam(1e-2), min_bytes=0)
        with strategy.scope():
            state = TrainState.create(apply_fn=loss_of, params=params, tx=tx)
        batch = jax.device_put((x, y), strategy.per_replica_sharding)
        for _ in range(3):
            state, loss = strategy.run(step, (state, batch))
            found.append(float(loss))
    assert losses[8] == pytest.approx(losses[1], rel=1e-5)
