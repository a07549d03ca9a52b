"""Steps in which some replicas have fewer rows than others, or none."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import NoRowsError, UnevenMeanWarning
from jaxdist.training import accumulate_gradients
from tests.tables import sampled

WIDTH, CLASSES = 3, 2
# The default split of 20 rows on 8 replicas.
TWENTY = (3, 3, 3, 3, 3, 3, 2, 0)


def _ctx() -> Any:
    return jaxdist.get_replica_context()


def _split(x: np.ndarray, rows: tuple[int, ...]) -> PerReplica:
    ends = np.cumsum((0, *rows))
    return PerReplica([x[a:b] for a, b in itertools.pairwise(ends)])


def _data(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(count, WIDTH)).astype(np.float32),
        rng.integers(0, CLASSES, count).astype(np.int32),
    )


def _exact(losses: Any) -> Any:
    count = _ctx().all_reduce("sum", losses.shape[0])
    return jaxdist.nn.compute_average_loss(losses, global_batch_size=count)


class Net(nnx.Module):
    """Two layers with a norm between them."""

    def __init__(self, norm: str, dropout: float) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(WIDTH, 4, rngs=rngs)
        trained = norm == "with parameters"
        self.norm = nnx.BatchNorm(
            4,
            use_running_average=norm == "of before",
            use_scale=trained,
            use_bias=trained,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.outer = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def _step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> Any:
    def loss_of(model: Any) -> Any:
        logits = model(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return _exact(losses), (losses, logits)

    grads_of = nnx.value_and_grad(loss_of, has_aux=True)
    (loss, (losses, logits)), grads = grads_of(model)
    optimizer.update(model, _ctx().all_reduce("sum", grads))
    metrics.update(loss=losses, logits=logits, labels=y)
    return _ctx().all_reduce("sum", loss)


def _new(norm: str, dropout: float = 0.0) -> tuple[Any, Any, Any]:
    model = Net(norm, dropout)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Welford("loss"))
    return model, optimizer, metrics


def _check_equal(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", sampled(range(40), 3))
def test_with_the_exact_loss_any_rows_give_what_one_device_gives(seed: int) -> None:
    draw = random.Random(seed)
    num_replicas, eagerly = draw.choice([2, 3, 4, 8]), draw.random() < 0.5
    rows = tuple(draw.choice((0, 0, 1, 2, 3, 5)) for _ in range(num_replicas))
    rows = (*rows[:-1], max(rows[-1], 1))
    x, y = _data(sum(rows), seed)
    many, one = _new("of before"), _new("of before")
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    of_one = jaxdist.OneDeviceStrategy("cpu:0")
    with jaxdist.config.run_eagerly(eagerly):
        for _ in range(2):
            loss = strategy.run(_step, (*many, _split(x, rows), _split(y, rows)))
            same = of_one.run(_step, (*one, x, y))
            assert float(loss) == pytest.approx(float(same), rel=1e-4)
    _check_equal(nnx.state(many[0], nnx.Param), nnx.state(one[0], nnx.Param))
    _check_equal(many[2].compute(), one[2].compute())


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_copies_of_a_variable_are_no_rows(eagerly: bool) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        seen = jaxdist.Variable(
            jnp.zeros(2),
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )
    metric: Any = nnx.metrics.Average()

    def step(metric: Any, x: Any) -> None:
        seen.assign_add(x.sum(0)[:2])
        metric.update(values=jnp.full(4, 3.0) + _ctx().replica_id_in_sync_group)

    x, _ = _data(3)
    with jaxdist.config.run_eagerly(eagerly):
        strategy.run(step, (metric, _split(x, (2, 1, 0))))
    assert (float(metric.total[...]), int(metric.count[...])) == (4 * 3.0 + 4 * 4.0, 8)
    np.testing.assert_allclose(seen.read_value(), x.sum(0)[:2], rtol=1e-5)


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_statistics_and_metrics_are_those_of_the_replicas_with_rows(eagerly: bool) -> None:
    strategy = jaxdist.MirroredStrategy()
    x, y = _data(20)
    model, optimizer, metrics = _new("without parameters", dropout=0.5)
    with jaxdist.config.run_eagerly(eagerly):
        strategy.run(_step, (model, optimizer, metrics, _split(x, TWENTY), _split(y, TWENTY)))
    plain: Any = Net("without parameters", 0.0)
    local = [np.asarray(plain.inner(v)) for v in _split(x, TWENTY).values if len(v)]
    mean = 0.01 * np.mean([v.mean(0) for v in local], axis=0)
    np.testing.assert_allclose(model.norm.mean[...], mean, rtol=1e-4, atol=1e-6)
    assert bool(jnp.isfinite(model.norm.var[...]).all())
    assert int(metrics.accuracy.count[...]) == 20
    assert bool(jnp.isfinite(metrics.compute()["loss"].standard_deviation))
    assert all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


# A mean over nothing


def _mean_of_loss(w: Any, x: Any) -> Any:
    loss = jnp.mean(w * x)  # here
    return _ctx().all_reduce("mean", loss)


def _into_state(node: Any, x: Any) -> None:
    total = x.sum() / x.shape[0]  # here
    node.v[...] = _ctx().all_reduce("sum", total)


def _by_hand(w: Any, x: Any) -> Any:
    return jax.lax.pmean(w * (x.sum() / x.shape[0]), "replica")  # here


def _through_jit(w: Any, x: Any) -> Any:
    return jax.lax.pmax(jax.jit(jnp.var)(w * x), "replica")  # here


def _in_a_loop(w: Any, x: Any) -> Any:
    def body(total: Any, _: Any) -> Any:
        return total + jnp.mean(x), None  # here

    return _ctx().all_reduce("sum", jax.lax.scan(body, w, jnp.arange(3))[0])


def _in_a_branch(w: Any, x: Any) -> Any:
    value = jax.lax.cond(w > 0, lambda: jnp.mean(x), lambda: w)  # here
    return _ctx().all_reduce("sum", value)


def _a_large_one(w: Any, x: Any) -> Any:
    mean = jnp.broadcast_to(x, (100, *x.shape)).mean(axis=1) * jnp.ones((100, 200))  # here
    return _ctx().all_reduce("sum", mean * w)


def _gathered(w: Any, x: Any) -> Any:
    return _ctx().all_gather(jnp.mean(w * x)[None], 0)  # here


REFUSED = (
    _mean_of_loss,
    _by_hand,
    _through_jit,
    _in_a_loop,
    _in_a_branch,
    _gathered,
)


def _line_of(fn: Callable[..., Any]) -> str:
    with open(__file__) as source:
        lines = source.read().split("\n")
    first = fn.__code__.co_firstlineno
    return f"{__file__}:{next(i for i, x in enumerate(lines, 1) if i > first and '# here' in x)}"


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize("step", REFUSED, ids=lambda fn: fn.__name__)
def test_a_mean_over_nothing_is_refused_with_the_line_and_three_remedies(
    step: Callable[..., Any], eagerly: bool
) -> None:
    strategy = jaxdist.MirroredStrategy()
    x = _split(np.ones(20, np.float32), TWENTY)
    with jaxdist.config.run_eagerly(eagerly), pytest.raises(NoRowsError) as error:
        strategy.run(step, (np.float32(1), x))
    text = str(error.value)
    assert _line_of(step) in text
    assert "Replica 7" in text
    assert str(list(TWENTY)) in text
    assert all(w in text for w in ("drop_remainder", "PartialBatch.PAD", "compute_average_loss"))


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
def test_state_keeps_its_value_where_a_mean_over_nothing_would_reach_it(eagerly: bool) -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.v = nnx.Variable(jnp.float32(5))

    holder = Holder()
    x = _split(np.ones(20, np.float32), TWENTY)
    with (
        jaxdist.config.run_eagerly(eagerly),
        pytest.raises(NoRowsError, match=_line_of(_into_state)),
    ):
        jaxdist.MirroredStrategy().run(_into_state, (holder, x))
    assert float(holder.v[...]) == 5


def _guarded(w: Any, x: Any) -> Any:
    mean = jnp.where(x.shape[0] > 0, jnp.mean(w * x), 0.0)
    return _ctx().all_reduce("sum", mean)


def _without_nan(w: Any, x: Any) -> Any:
    return _ctx().all_reduce("sum", jnp.nan_to_num(jnp.mean(x)) * w)


def _largest(w: Any, x: Any) -> Any:
    return jax.lax.pmax(jnp.max(w * x, initial=-jnp.inf), "replica")


def _masked(w: Any, x: Any) -> Any:
    count = _ctx().all_reduce("sum", x.shape[0])
    return _ctx().all_reduce("sum", jnp.where(count > 0, (w * x).sum() / count, 0.0))


def _users_own_nan(w: Any, x: Any) -> Any:
    return _ctx().all_reduce("sum", jnp.where(w > 5, jnp.nan, x.sum()))


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize(
    ("step", "expected"),
    [(_guarded, 7), (_without_nan, 7), (_largest, 1), (_masked, 1), (_users_own_nan, 20)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_no_nan_in_the_end_is_right(
    step: Callable[..., Any], expected: float, eagerly: bool
) -> None:
    x = _split(np.ones(20, np.float32), TWENTY)
    with jaxdist.config.run_eagerly(eagerly):
        found = jaxdist.MirroredStrategy().run(step, (np.float32(1), x))
    assert float(found) == pytest.approx(expected)


def test_a_batch_without_any_rows_is_refused_and_leaves_statistics_as_they_were() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    empty = PerReplica([np.zeros((0, 4), np.float32)] * 2)
    with pytest.raises(NoRowsError, match=r"Replicas \[0, 1\]"):
        strategy.run(_mean_of_loss, (np.float32(1), empty))
    norm: Any = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    strategy.run(lambda m, x: m(x), (norm, empty))
    assert norm.var[...].tolist() == [1, 1, 1, 1]


def test_accumulated_gradients_of_no_rows_are_zero_with_the_exact_loss_and_refused_else() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = _split(np.arange(4, dtype=np.float32), (4, 0))

    def step(of: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: Any, x: Any) -> Any:
            loss, grad = accumulate_gradients(jax.value_and_grad(of), 2)(w, x)
            return _ctx().all_reduce("sum", (loss, grad))

        return run

    def exact(w: Any, x: Any) -> Any:
        return jaxdist.nn.compute_average_loss(w * x, global_batch_size=2)

    loss, grad = strategy.run(step(exact), (np.float32(2), x))
    assert (float(loss), float(grad)) == (3.0, 1.5)
    with pytest.raises(NoRowsError):
        strategy.run(step(lambda w, x: jnp.mean(w * x)), (np.float32(2), x))


def test_a_function_refuses_it_too() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = _split(np.ones(3, np.float32), (3, 0))
    call = jaxdist.function(lambda x: strategy.run(_mean_of_loss, (np.float32(1), x)))
    with pytest.raises(NoRowsError, match=_line_of(_mean_of_loss)):
        call(x)


# A mean over replicas that have different numbers of rows


@pytest.mark.parametrize("rows", [(2, 1), (2, 2, 1)])
def test_an_uneven_step_that_takes_a_mean_is_warned_of_once(rows: tuple[int, ...]) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(len(rows))])

    def step(x: Any) -> Any:
        return _ctx().all_reduce("mean", x.mean())  # here

    with pytest.warns(UnevenMeanWarning) as told:
        strategy.run(step, (_split(np.ones(sum(rows), np.float32), rows),))
    assert len(told) == 1
    # Warnings are errors in tests: another shape of the same step says nothing.
    more = tuple(count + 1 for count in rows)
    strategy.run(step, (_split(np.ones(sum(more), np.float32), more),))
    text = str(told[0].message)
    assert str(list(rows)) in text
    assert _line_of(step) in text
    assert "compute_average_loss" in text
    assert told[0].filename == __file__


def test_even_steps_and_sums_say_nothing() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(lambda x: _ctx().all_reduce("mean", x.mean()), (_split(np.ones(4), (2, 2)),))
    strategy.run(lambda x: _ctx().all_reduce("sum", x.sum()), (_split(np.ones(3), (2, 1)),))
