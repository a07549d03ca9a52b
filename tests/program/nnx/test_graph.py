"""Flax NNX objects as arguments, updated in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist.errors import ArgumentTypeError, JaxdistError, StateDivergenceError

pytestmark = pytest.mark.both_executors

X = PerReplica(np.arange(8, dtype=np.float32))


class Shared(nnx.Module):
    """Two names for one layer."""

    def __init__(self) -> None:
        self.first = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.second = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def test_a_shared_module_stays_shared_and_equals_plain_nnx() -> None:
    strategy = jaxdist.MirroredStrategy()
    ours, theirs = Shared(), Shared()
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)

    def grads_of(model: Any, x: Any) -> Any:
        return nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)

    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, get_replica_context().all_reduce("mean", grads_of(model, x)))

    ours_tx: Any = nnx.Optimizer(ours, optax.adam(0.1), wrt=nnx.Param)
    theirs_tx = nnx.Optimizer(theirs, optax.adam(0.1), wrt=nnx.Param)
    for _ in range(5):
        strategy.run(step, (ours, ours_tx, jax.device_put(x, strategy.per_replica_sharding)))
        theirs_tx.update(theirs, grads_of(theirs, x))
    assert ours.first is ours.second
    np.testing.assert_allclose(ours.first.kernel[...], theirs.first.kernel[...], rtol=1e-4)


def test_one_module_given_twice_is_one_module() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(a: Any, b: Any) -> Any:
        a.bias[...] = a.bias[...] + 1
        return b.bias[...]

    for i in range(1, 4):
        assert float(strategy.run(step, (model, model))[0]) == i
    assert float(model.bias[0]) == 3


class Moded(nnx.Module):
    """A module that knows whether it trains."""

    def __init__(self) -> None:
        self.dropout = nnx.Dropout(0.5, deterministic=False, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(1, use_running_average=False, momentum=0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(x))


@pytest.mark.compiled
def test_switching_to_evaluation_and_back_is_noticed_and_right() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = Moded()
    traces = []

    def step(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x)

    rows = jax.device_put(np.arange(16, dtype=np.float32)[:, None], strategy.per_replica_sharding)
    for _ in range(3):
        model.train()
        for _ in range(3):
            trained = np.asarray(strategy.run(step, (model, rows)).array)
        assert (trained == 0).any(), "dropout was on"
        mean, var = (np.asarray(v[...]) for v in (model.norm.mean, model.norm.var))
        model.eval()
        for _ in range(3):
            out = np.asarray(strategy.run(step, (model, rows)).array)
        expected = (np.arange(16)[:, None] - mean) / np.sqrt(var + 1e-5)
        np.testing.assert_allclose(out, expected, rtol=1e-4)
        np.testing.assert_array_equal(model.norm.mean[...], mean)
    assert len(traces) == 2


def test_a_replaced_attribute_is_noticed_between_steps() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(model: Any) -> Any:
        return model.kernel[...].sum()

    for value in (2.0, 3.0, 4.0):
        model.kernel = nnx.Param(jnp.full((1, 1), value))
        for _ in range(3):
            assert float(strategy.run(step, (model,))) == value
    model.kernel[...] = jnp.full((1, 1), 7.0)
    assert float(strategy.run(step, (model,))) == 7


class Holder(nnx.Module):
    """Variables in containers."""

    def __init__(self) -> None:
        self.mapping = nnx.data({"a": nnx.Param(jnp.ones(2))})
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])


def test_a_variable_replaced_in_a_dict_of_the_module_is_noticed() -> None:
    # Only the attributes of modules were looked at, and the old variable went on being used.
    strategy = jaxdist.MirroredStrategy()
    model: Any = Holder()

    def step(model: Any) -> Any:
        return model.mapping["a"][...].sum()

    for value in (1.0, 5.0):
        model.mapping["a"] = nnx.Param(jnp.full(2, value))
        for _ in range(3):
            assert float(strategy.run(step, (model,))) == 2 * value


def test_a_layer_replaced_in_a_list_of_the_module_is_noticed() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = Holder()

    def step(model: Any) -> Any:
        return model.layers[0].bias[...].sum()

    for value in (1.0, 5.0):
        model.layers[0] = nnx.Linear(
            1, 1, bias_init=nnx.initializers.constant(value), rngs=nnx.Rngs(0)
        )
        for _ in range(3):
            assert float(strategy.run(step, (model,))) == value


def _applied(module: Any, x: Any) -> Any:
    return module(x)


def _drawn(rngs: Any) -> Any:
    return jax.random.normal(rngs.params(), (4,))


def test_batch_statistics_are_the_mean_over_the_replicas() -> None:
    strategy = jaxdist.MirroredStrategy()
    norm: Any = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    rows = np.random.default_rng(0).normal(size=(16, 1)).astype(np.float32)
    x = jax.device_put(rows, strategy.per_replica_sharding)
    for _ in range(3):
        strategy.run(_applied, (norm, x))
    local = rows.reshape(8, 2)
    np.testing.assert_allclose(norm.mean[...], [local.mean(1).mean()], atol=1e-6)
    np.testing.assert_allclose(norm.var[...], [local.var(1).mean()], rtol=1e-4)


def test_metrics_are_the_sum_of_what_all_replicas_saw() -> None:
    strategy = jaxdist.MirroredStrategy()
    metrics: Any = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )
    logits = np.eye(4, dtype=np.float32)[[0, 1, 2, 3] * 4]
    labels = np.array([0, 1, 2, 0] * 4, np.int32)

    def step(metrics: Any, logits: Any, labels: Any, loss: Any) -> None:
        metrics.update(loss=loss, logits=logits, labels=labels)

    given = jax.device_put((logits, labels), strategy.per_replica_sharding)
    for i in range(1, 4):
        strategy.run(step, (metrics, *given, X))
        found = metrics.compute()
        assert float(found["loss"]) == 3.5
        assert float(found["accuracy"]) == 0.75
        assert int(metrics.loss.count[...]) == 8 * i
    metrics.reset()
    strategy.run(step, (metrics, *given, X))
    assert int(metrics.loss.count[...]) == 8


def test_a_metric_that_is_reset_in_the_step_is_right_or_refused() -> None:
    # The value from before the step was taken off once for each replica.
    strategy = jaxdist.MirroredStrategy()
    metric: Any = nnx.metrics.Average()

    def step(metric: Any, x: Any) -> None:
        metric.reset()
        metric.update(values=x)

    try:
        for _ in range(3):
            strategy.run(step, (metric, X))
    except JaxdistError:
        return
    assert float(metric.compute()) == 3.5


def test_a_metric_that_is_no_sum_is_right_or_refused() -> None:
    # Welford keeps a running mean; adding up its increments gave 28 for the mean of 0 to 7.
    strategy = jaxdist.MirroredStrategy()
    metric: Any = nnx.metrics.Welford()
    rows = PerReplica([np.full(1, r, np.float32) for r in range(8)])
    try:
        strategy.run(lambda m, x: m.update(values=x), (metric, rows))
    except JaxdistError:
        return
    found = metric.compute()
    assert float(found.mean) == pytest.approx(3.5)
    assert float(found.standard_deviation) == pytest.approx(np.arange(8).std())


def test_random_streams_differ_between_replicas_and_move_on() -> None:
    strategy = jaxdist.MirroredStrategy()
    rngs: Any = nnx.Rngs(0)
    seen = []
    for _ in range(3):
        draws = strategy.run(_drawn, (rngs,))
        seen += [np.asarray(v).tobytes() for v in draws.values]
    assert len(set(seen)) == 24
    assert int(rngs.default.count[...]) == 3

    again: Any = nnx.Rngs(0)
    draws = strategy.run(_drawn, (again,))
    assert [np.asarray(v).tobytes() for v in draws.values] == seen[:8]


def test_a_forked_stream_of_several_keys_works() -> None:
    # `fold_in` takes one key; a variable of four keys was an error of JAX.
    strategy = jaxdist.MirroredStrategy()
    rngs: Any = nnx.Rngs(0).split(4) if hasattr(nnx.Rngs, "split") else nnx.Rngs(0).fork(split=4)

    def step(rngs: Any) -> Any:
        return jax.vmap(lambda k: jax.random.normal(k, (2,)))(
            jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs.params.key[...], 1)
        )

    draws = strategy.run(step, (rngs,)).values
    assert len({np.asarray(v).tobytes() for v in draws}) == 8


def test_a_variable_added_in_the_step_is_refused_by_name_and_nothing_changes() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(model: Any) -> None:
        model.bias[...] = model.bias[...] + 1
        model.extra = nnx.Param(jnp.ones(1))

    with pytest.raises(StateDivergenceError, match=r"added \['.*extra'\]"):
        strategy.run(step, (model,))
    assert not hasattr(model, "extra")
    assert float(model.bias[0]) == 0

    def remove(model: Any) -> None:
        model.kernel[...] = model.kernel[...] + 1
        del model.bias

    kernel = np.asarray(model.kernel[...])
    with pytest.raises(StateDivergenceError, match=r"removed \['.*bias'\]"):
        strategy.run(remove, (model,))
    np.testing.assert_array_equal(model.kernel[...], kernel)

    def switch(model: Any) -> None:
        model.bias[...] = model.bias[...] + 1
        model.use_bias = False

    with pytest.raises(StateDivergenceError, match="attribute"):
        strategy.run(switch, (model,))
    assert model.use_bias
    assert float(model.bias[0]) == 0


@pytest.mark.parametrize("warm_up", [0, 2], ids=["first_call", "after_others"])
def test_an_exception_in_the_step_leaves_the_state_as_it_was(warm_up: int) -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(model: Any, x: Any) -> None:
        model.bias[...] = model.bias[...] + 1
        if x.shape == (3,):
            raise RuntimeError("in the middle")

    for _ in range(warm_up):
        strategy.run(step, (model, np.ones(2, np.float32)))
    with pytest.raises(RuntimeError, match="in the middle"):
        strategy.run(step, (model, np.ones(3, np.float32)))
    assert float(model.bias[0]) == warm_up
    strategy.run(step, (model, np.ones(2, np.float32)))
    assert float(model.bias[0]) == warm_up + 1


def test_a_variable_by_itself_is_refused_and_inside_an_object_it_is_written() -> None:
    strategy = jaxdist.MirroredStrategy()
    variable: Any = nnx.Param(jnp.zeros(2))

    def step(variable: Any) -> None:
        variable[...] = variable[...] + 1

    with pytest.raises(ArgumentTypeError, match=r"args\[0\], a Param"):
        strategy.run(step, (variable,))
    with pytest.raises(ArgumentTypeError, match=r"kwargs\['variable'\]"):
        strategy.run(step, (), {"variable": variable})
    held: Any = nnx.Dict(value=variable)
    strategy.run(lambda held: step(held.value), (held,))
    np.testing.assert_array_equal(variable[...], [1, 1])


def test_a_module_inside_a_dict_is_updated_in_place() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(given: Any) -> Any:
        given["model"].bias[...] = given["model"].bias[...] + given["x"]

    for i in range(1, 4):
        strategy.run(step, ({"model": model, "x": np.float32(1)},))
        assert float(model.bias[0]) == i


@pytest.mark.compiled
def test_two_models_take_turns_in_one_step_function() -> None:
    strategy = jaxdist.MirroredStrategy()
    models: list[Any] = [nnx.Linear(1, 1, rngs=nnx.Rngs(s)) for s in range(12)]
    traces = []

    def step(model: Any, x: Any) -> None:
        traces.append(1)
        model.bias[...] = model.bias[...] + x

    for _ in range(3):
        for i, model in enumerate(models):
            strategy.run(step, (model, np.float32(i)))
    assert [float(m.bias[0]) for m in models] == [3.0 * i for i in range(12)]
    assert len(traces) == 1
