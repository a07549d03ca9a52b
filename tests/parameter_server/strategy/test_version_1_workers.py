"""`ParameterServerStrategy` of version 1: workers in threads, each with its own strategy."""

import gc
import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import IndexedSlices, PerReplica, VariableAggregation
from jaxdist.errors import (
    ArgumentTypeError,
    DeadlineExceededError,
    DeviceError,
    ShapeError,
    StateDivergenceError,
)
from tests.parameter_server.strategy.version_1 import (
    ParameterServerStrategy,
    make_resolver,
    make_spec,
    make_worker,
    run_workers,
)


@pytest.mark.parametrize("chief", [False, True])
@pytest.mark.parametrize(("workers", "replicas"), [(1, 1), (3, 1), (2, 2), (3, 2)])
def test_sums_grow_by_all_replicas_and_first_replicas_once_per_worker(
    workers: int, replicas: int, chief: bool
) -> None:
    steps = 5

    def script(strategy: Any, index: int) -> Any:
        assert strategy.num_replicas_in_sync == replicas
        with strategy.scope():
            x = jaxdist.Variable(10.0, name="x", aggregation=VariableAggregation.SUM)
            y = jaxdist.Variable(20.0, name="y", aggregation=VariableAggregation.SUM)
            z = jaxdist.Variable(30.0, name="z", aggregation=VariableAggregation.ONLY_FIRST_REPLICA)

        def step(one: Any) -> None:
            x.assign_add(one)
            y.assign_add(one)
            z.assign_add(one)

        ones = PerReplica([np.float32(1)] * replicas)
        for _ in range(steps):
            strategy.run(step, (ones,))
        return strategy, (x, y, z)

    found = run_workers(script, make_spec(workers, chief=chief), replicas)
    grown = steps * workers * replicas
    for strategy, variables in found:
        assert [float(v) for v in variables] == [10 + grown, 20 + grown, 30 + steps * workers]
        # In the order of their creation, on one server after the other.
        places = [strategy.storage.find_server(v.remote_name) for v in variables]
        assert places == [0, 1, 0]


def test_all_workers_have_the_first_values_of_the_chief() -> None:
    spec = make_spec(3, chief=True)
    made = threading.Event()

    def script(strategy: Any, index: int) -> float:
        if index == 0:
            assert strategy.extended.experimental_should_init
            # The others have asked for it by now, or do so later; the result is the same.
            made.wait(0.2)
        with strategy.scope():
            v = jaxdist.Variable(float(index + 7), name="v")
        made.set()
        return float(v)

    assert run_workers(script, spec) == [7.0, 7.0, 7.0]


def test_a_worker_without_a_chief_says_what_it_waits_for(monkeypatch: Any) -> None:
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    strategy = ParameterServerStrategy(make_resolver(make_spec(2), "worker", 1))
    with strategy.scope(), pytest.raises(DeadlineExceededError, match="chief to make 'v' on ps 0"):
        jaxdist.Variable(1.0, name="v")


def test_workers_that_make_different_variables_get_an_error() -> None:
    spec = make_spec(2)

    def script(strategy: Any, index: int) -> None:
        with strategy.scope():
            jaxdist.Variable(np.zeros(index + 1), name="v")

    with pytest.raises(ShapeError, match="exists"):
        run_workers(script, spec)


def test_servers_end_with_the_last_strategy_that_uses_them() -> None:
    spec = make_spec(1)

    def grow() -> float:
        strategy = ParameterServerStrategy(make_resolver(spec))
        with strategy.scope():
            v = jaxdist.Variable(1.0, name="v")
        v.assign_add(1.0)
        return float(v)

    assert grow() == 2
    gc.collect()
    assert grow() == 2


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(nnx.relu(self.norm(self.a(x))))


def _train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, jaxdist.get_replica_context().all_reduce("mean", grads))
    return loss


def _batches(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(count, 16, 4)).astype("float32")
    return [(x, np.tanh(x @ np.ones((4, 2), "float32"))) for x in xs]


def _fit(strategy: Any, batches: Any) -> tuple[list[float], Any]:
    with strategy.scope():
        model = _Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    losses = []
    for batch in strategy.experimental_distribute_dataset(batches):
        found = strategy.run(_train, (model, optimizer, *batch))
        losses.append(float(strategy.reduce("mean", found, axis=None)))
    return losses, nnx.state(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_worker_trains_as_a_mirrored_strategy_does(replicas: int) -> None:
    own, state = _fit(make_worker(replicas), _batches(10))
    mirrored = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    wanted, wanted_state = _fit(mirrored, _batches(10))
    np.testing.assert_allclose(own, wanted, rtol=1e-5)
    assert own[-1] < own[0]
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_train_one_model_and_share_the_state_of_its_optimizer(replicas: int) -> None:
    workers, steps = 2, 15

    def script(strategy: Any, index: int) -> Any:
        with strategy.scope():
            model = _Net(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = []
        for batch in strategy.experimental_distribute_dataset(_batches(steps, index)):
            found = strategy.run(_train, (model, optimizer, *batch))
            losses.append(float(strategy.reduce("mean", found, axis=None)))
        return losses, model, optimizer

    found = run_workers(script, make_spec(workers), replicas)
    for losses, _, optimizer in found:
        assert losses[-1] < losses[0]
        assert int(optimizer.step[...]) == workers * steps
        count = optimizer.opt_state[0].count
        assert int(np.asarray(count[...])) == workers * steps
    first, second = (jax.tree.leaves(nnx.state(model)) for _, model, _ in found)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_gradients_that_are_not_reduced_are_an_error() -> None:
    strategy = make_worker(2)
    with strategy.scope():
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))

    x = PerReplica([np.ones((2, 4), "float32"), np.zeros((2, 4), "float32")])
    with pytest.raises(StateDivergenceError, match="gradient of"):
        strategy.run(train, (model, optimizer, x))


def test_a_step_is_traced_once() -> None:
    strategy = make_worker(2)
    with strategy.scope():
        v = jaxdist.Variable(np.zeros(3, "float32"), aggregation=VariableAggregation.MEAN)
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    traces = []

    def step(model: Any, x: Any, scale: float) -> Any:
        traces.append(1)
        v.assign_add(model(x)[0] * scale)
        return v.value()

    for n in range(20):
        x = PerReplica([np.full((2, 3), n, "float32")] * 2)
        strategy.run(step, (model, x, float(n)))
    assert len(traces) == 1


def test_how_an_array_lies_on_the_devices_decides_on_the_program() -> None:
    strategy = make_worker(2)
    x = np.arange(4, dtype="float32")
    whole = strategy.run(lambda x: x.sum(), (x,))
    parts = jax.device_put(x, strategy.per_replica_sharding)

    def add(x: Any) -> Any:
        return x.sum()

    assert float(whole) == float(strategy.run(add, (x,))) == 6
    found = strategy.experimental_local_results(strategy.run(add, (parts,)))
    assert [float(v) for v in found] == [1, 5]
    assert float(strategy.run(add, (jax.device_put(x, strategy.replicated_sharding),))) == 6
    assert float(strategy.run(add, (jax.device_put(x, jax.devices()[5]),))) == 6


@pytest.mark.parametrize("replicas", [1, 2])
def test_methods_of_steps_and_across_replicas(replicas: int) -> None:
    strategy = make_worker(replicas)
    with strategy.scope():
        v = jaxdist.Variable(1.0, name="v")
        table = jaxdist.Variable(
            np.zeros((5, 2), "float32"), name="table", aggregation=VariableAggregation.SUM
        )

    def merge(strategy: Any, value: Any) -> Any:
        total = strategy.extended.reduce_to("sum", value, destinations=v)
        return strategy.extended.update(v, lambda v, t: v.assign_add(t), args=(total,))

    def step(x: Any) -> Any:
        context = jaxdist.get_replica_context()
        # Rows that two replicas change are changed twice.
        ids = jnp.array([0, 3])
        table.scatter_add(IndexedSlices(jnp.ones((2, 2)) * (x - x + 1), ids))
        context.merge_call(merge, args=(x,))
        return context.all_reduce("sum", x), x

    values = PerReplica([np.float32(n + 1) for n in range(replicas)])
    total = replicas * (replicas + 1) / 2
    summed, own = strategy.run(step, (values,))
    assert float(summed) == total
    assert float(strategy.reduce("sum", own)) == total
    assert float(strategy.reduce("mean", summed)) == total
    assert float(v) == 1 + total
    want = np.zeros((5, 2))
    want[[0, 3]] = replicas
    np.testing.assert_array_equal(table.numpy(), want)
    parts = strategy.experimental_local_results(own)
    assert [float(x) for x in parts] == [n + 1 for n in range(replicas)]


def test_two_replicas_need_devices_of_their_own() -> None:
    with pytest.raises(DeviceError, match="for each of 5 worker"):
        ParameterServerStrategy(make_resolver(make_spec(5), replicas=2))
    with pytest.raises(DeviceError, match="which has 8 such devices"):
        make_worker(9)


def test_compiler_options_have_no_effect_on_workers_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxdist._validate.arguments._LOGGED", set())
    strategy = make_worker(2)
    options = jaxdist.RunOptions(compiler_options={"xla_cpu_enable_fast_math": False})
    with caplog.at_level(logging.INFO, "jaxdist"):
        for _ in range(2):
            found = strategy.run(lambda x: x * 2, (1.5,), options=options)
    assert float(found) == 3.0
    told = [r.getMessage() for r in caplog.records if "compiler_options" in r.getMessage()]
    assert len(told) == 1
    assert "on workers of parameter servers: compiler_options has no effect" in told[0]


def test_options_of_run_apply() -> None:
    strategy = make_worker(2)
    traces = []

    def step(size: int, x: Any) -> Any:
        traces.append(size)
        return jnp.ones(size) * x

    options = jaxdist.RunOptions(static_argnames=("size",), donate_argnums=(1,))
    for size in (2, 3, 2, 3):
        found = strategy.run(step, (size, 1.5), options=options)
        np.testing.assert_array_equal(found, np.full(size, 1.5, "float32"))
    assert traces == [2, 3]
    with pytest.raises(ArgumentTypeError, match="options=7"):
        strategy.run(step, (2, 1.5), options=7)
