"""Metrics of values that were divided by the rows of all replicas: the warning, and the numbers."""

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context
from jaxdist.errors import DividedMetricWarning
from tests.tables import sampled

ROWS = 24
X = np.linspace(0.5, 2, ROWS * 2, dtype="float32").reshape(ROWS, 2)


def _sum(value: Any) -> Any:
    return get_replica_context().all_reduce("sum", value)


def _mean(value: Any) -> Any:
    return get_replica_context().all_reduce("mean", value)


def _count() -> int:
    return int(get_replica_context().num_replicas_in_sync)


def _average(losses: Any, **kwargs: Any) -> Any:
    return jaxdist.nn.compute_average_loss(losses, **kwargs)


def _losses(x: Any) -> Any:
    return jnp.sum(x**2, axis=-1)


def _average_of_all(x: Any) -> Any:
    return _average(_losses(x), global_batch_size=_sum(len(x)))


def _value_and_grad(x: Any) -> Any:
    return jax.value_and_grad(lambda w: _average_of_all(w * x))(jnp.float32(1))[0]


def _in_jit(x: Any) -> Any:
    return jax.jit(jax.checkpoint(_average_of_all))(x)


def _in_scan(x: Any) -> Any:
    rows = _sum(len(x))

    def body(total: Any, row: Any) -> Any:
        return total + jnp.sum(row**2) / rows, None

    return jax.lax.scan(body, jnp.float32(0), x)[0]


def _standardized(x: Any) -> Any:
    mean = _sum(jnp.sum(x)) / _sum(x.size)
    return jnp.mean((x - mean) / jnp.sqrt(_sum(jnp.sum(x**2)) / _sum(x.size)))


# Ways to compute a loss, and whether it is a share of the mean.
LOSSES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "average of all": (_average_of_all, True),
    "average": (lambda x: _average(_losses(x)), True),
    "average of a number": (
        lambda x: _average(_losses(x), global_batch_size=len(x) * _count()),
        True,
    ),
    "sum over a number": (lambda x: jnp.sum(_losses(x)) / (len(x) * _count()), True),
    "sum times a number": (lambda x: jnp.sum(_losses(x)) * (1 / (len(x) * _count())), True),
    "rows of a share": (lambda x: jnp.sum(_losses(x) / _sum(len(x))), True),
    "sum of lax.psum": (
        lambda x: jnp.sum(_losses(x)) / jax.lax.psum(jnp.float32(len(x)), "replica"),
        True,
    ),
    "mask": (
        lambda x: jnp.sum(jnp.where(x[:, 0] > 1, _losses(x), 0)) / _sum(jnp.sum(x[:, 0] > 1)),
        True,
    ),
    "weights": (
        lambda x: jnp.sum(_losses(x) * x[:, 0]) / jnp.maximum(_sum(jnp.sum(x[:, 0])), 1),
        True,
    ),
    "with regularization": (
        lambda x: _average_of_all(x) + jaxdist.nn.scale_regularization_loss(jnp.float32(0.1)),
        True,
    ),
    "value_and_grad": (_value_and_grad, True),
    "jit": (_in_jit, True),
    "scan": (_in_scan, True),
    "losses": (_losses, False),
    "own mean": (lambda x: jnp.mean(_losses(x)), False),
    "half of the own mean": (lambda x: 0.5 * jnp.mean(_losses(x)), False),
    "mean over the number of rows of one": (
        lambda x: jnp.sum(_losses(x)) / _mean(len(x)),
        False,
    ),
    "sum of the shares": (lambda x: _sum(_average_of_all(x)), False),
    "share times replicas": (lambda x: _average_of_all(x) * _count(), False),
    "share times rows": (lambda x: _average_of_all(x) * _sum(len(x)) / len(x), False),
    "sum over all by all": (lambda x: _sum(jnp.sum(_losses(x))) / _sum(len(x)), False),
    "standardized": (_standardized, False),
}


class SumOnly(nnx.metrics.Metric):
    """The sum of what it is given."""

    def __init__(self, argname: str) -> None:
        self.argname = argname
        self.total = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, **kwargs: Any) -> None:
        self.total[...] += jnp.sum(kwargs[self.argname])

    def compute(self) -> Any:
        return self.total[...]


METRICS: dict[str, Callable[[], Any]] = {
    "Average": lambda: nnx.metrics.Average("loss"),
    "Welford": lambda: nnx.metrics.Welford("loss"),
    "MultiMetric": lambda: nnx.MultiMetric(a=nnx.metrics.Average("loss")),
    "a sum alone": lambda: SumOnly("loss"),
}
EXECUTORS = ["compiled", "op by op", "virtual"]


def _make(executor: str) -> jaxdist.Strategy:
    if executor == "virtual":
        return jaxdist.OneDeviceStrategy("cpu:0", deterministic=4)
    return jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)])


def _compute(metric: Any) -> float:
    value = metric.compute()
    value = value["a"] if isinstance(value, dict) else value
    return float(getattr(value, "mean", value) if not isinstance(value, jax.Array) else value)


TABLE = list(itertools.product(LOSSES, METRICS, EXECUTORS))


@pytest.mark.parametrize("row", sampled(TABLE, 24, name=", ".join))
def test_a_warning_exactly_where_the_mean_is_too_small(row: tuple[str, str, str]) -> None:
    of_loss, of_metric, executor = row
    loss, is_share = LOSSES[of_loss]
    strategy, metric = _make(executor), METRICS[of_metric]()
    x = jax.device_put(X, strategy.per_replica_sharding)

    def step(metric: Any, x: Any) -> Any:
        value = loss(x)
        metric.update(loss=value)
        return _sum(jnp.sum(value)) / (1 if is_share else _count() * jnp.size(value))

    eagerly = jaxdist.config.run_eagerly() if executor == "op by op" else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as seen, eagerly:
        warnings.simplefilter("always")
        mean = float(strategy.run(step, (metric, x)))
    found = [w for w in seen if issubclass(w.category, DividedMetricWarning)]
    is_sum = of_metric == "a sum alone"
    assert len(found) == (is_share and not is_sum), found
    # The number that the warning speaks of.
    factor = 1 / 4 if is_share else 1
    if not is_sum:
        np.testing.assert_allclose(_compute(metric), mean * factor, rtol=1e-4)
    elif is_share:
        np.testing.assert_allclose(_compute(metric), mean, rtol=1e-4)


@pytest.mark.both_executors
@pytest.mark.parametrize(
    "mean",
    [
        jnp.mean,
        jnp.average,
        lambda y: y.mean(),
        lambda y: optax.l2_loss(y).mean(),
        jax.jit(jnp.mean),
    ],
    ids=["jnp.mean", "jnp.average", "method", "optax", "jit"],
)
def test_a_mean_over_a_dim_as_long_as_the_replicas_are_many_is_no_share(mean: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    metric = nnx.metrics.Average("loss")
    x = jax.device_put(X, strategy.per_replica_sharding)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DividedMetricWarning)
        strategy.run(lambda metric, x: metric.update(loss=mean(x)), (metric, x))
    np.testing.assert_allclose(_compute(metric), mean(X), rtol=1e-5)


@pytest.mark.both_executors
def test_the_warning_names_metric_line_and_remedy_on_an_uneven_batch() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def step(metrics: Any, x: Any) -> None:
        metrics.update(loss=_average_of_all(x))

    batch = next(iter(strategy.experimental_distribute_dataset([X[:11]])))
    with pytest.warns(DividedMetricWarning, match="args") as seen:
        strategy.run(step, (metrics, batch))
    [text] = {str(w.message) for w in seen}
    assert "args[0].loss.total" in text
    assert f"{__file__}:" in text
    assert "all_reduce('sum', loss)" in text
