"""A step on the replicas against the same step on one device: a wrong scale is told."""

import copy
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
from jaxdist import GradientReport, PerReplica, RunOptions, errors, get_replica_context
from jaxdist.nn import compute_average_loss

FOUR = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
_RNG = np.random.default_rng(0)
PARAMS = {"w": _RNG.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
BATCH = {
    "x": _RNG.normal(size=(8, 3)).astype(np.float32),
    "y": _RNG.normal(size=(8, 2)).astype(np.float32),
}


def _batch() -> Any:
    return jax.device_put(BATCH, FOUR.per_replica_sharding)


def _errors(params: Any, batch: Any) -> Any:
    out = jnp.tanh(batch["x"] @ params["w"]) + params["b"][None]
    return ((out - batch["y"]) ** 2).mean(axis=1)


def _mean(errors: Any) -> Any:
    return errors.mean()


def _step(tx: Any, loss_of: Callable[[Any], Any], *ops: str) -> Callable[..., Any]:
    """A step that turns errors into a loss by `loss_of`, and all-reduces by each of `ops`."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(_errors(p, batch)))(params)
        for op in ops:
            grads = get_replica_context().all_reduce(op, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def _check(tx: Any, loss_of: Callable[[Any], Any], *ops: str) -> GradientReport:
    return _four().check_gradients(_step(tx, loss_of, *ops), ((PARAMS, tx.init(PARAMS)), _batch()))


def _four() -> jaxdist.Strategy:
    """A strategy that has not seen the other steps made here, and does not warn of so many."""
    return copy.deepcopy(FOUR)


RIGHT = [(_mean, ("mean",)), (compute_average_loss, ("sum",)), (_mean, ("mean", "mean"))]
WRONG = [
    (_mean, ("sum",), 4.0, "mean over the rows of a replica and the gradients are summed"),
    (_mean, ("mean", "sum"), 4.0, "summed twice"),
    (compute_average_loss, ("mean",), 0.25, "averaged as well"),
    (jnp.sum, ("mean",), 0.25, "a sum over rows and the gradients are averaged"),
    (compute_average_loss, ("sum", "sum"), 4.0, "4 is the number of replicas"),
    (_mean, ("sum", "sum"), 16.0, "16 is neither the number of replicas"),
]
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "small_sgd": optax.sgd(1e-4),
}


@pytest.mark.parametrize("name", ["sgd", "adamw", "small_sgd"])
@pytest.mark.parametrize(("loss_of", "ops"), RIGHT)
def test_right_scale_is_equal_and_raises_nothing(name: str, loss_of: Any, ops: Any) -> None:
    report = _check(OPTIMIZERS[name], loss_of, *ops)
    report.raise_if_different()
    assert report.is_equal
    assert report.factor == 1.0
    assert "equal in all" in repr(report)
    assert "result[1]" in report.not_compared


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize(("loss_of", "ops", "factor", "meaning"), WRONG)
def test_wrong_scale_is_told_with_its_factor_and_what_it_means(
    name: str, loss_of: Any, ops: Any, factor: float, meaning: str
) -> None:
    report = _check(OPTIMIZERS[name], loss_of, *ops)
    assert report.is_uniform
    assert report.factor == pytest.approx(factor, rel=0.01)
    assert meaning in repr(report)
    assert "result[0]" in repr(report)
    with pytest.raises(jaxdist.errors.StateDivergenceError, match="by the factor"):
        report.raise_if_different()


def _in_a_dict(state: Any, batch: Any) -> Any:
    (params, opt_state), loss = _summed(state, batch)
    return {"loss": loss, "new": {"params": params, "opt_state": opt_state}}


def _apart(params: Any, opt_state: Any, batch: Any) -> Any:
    return _summed((params, opt_state), batch)[0]


def _in_a_list(params: Any, opt_state: Any, batch: Any) -> Any:
    return [batch["x"].sum(), _summed((params, opt_state), batch)[0]]


_summed = _step(OPTIMIZERS["small_sgd"], _mean, "sum")


@pytest.mark.parametrize(
    ("fn", "is_apart"),
    [(_in_a_dict, False), (_apart, True), (_in_a_list, True)],
    ids=["in_a_dict", "apart", "in_a_list"],
)
def test_state_is_found_wherever_it_is_given_and_returned(fn: Any, is_apart: bool) -> None:
    # Small movements of large parameters: compared as values they would look equal.
    opt_state = OPTIMIZERS["small_sgd"].init(PARAMS)
    state = (PARAMS, opt_state) if is_apart else ((PARAMS, opt_state),)
    names = ("params", "opt_state", "batch") if is_apart else ("state", "batch")
    by_name = dict(zip(names, (*state, _batch()), strict=True))
    for args, kwargs in (((*state, _batch()), {}), ((), by_name)):
        report = _four().check_gradients(fn, args, kwargs)
        assert report.factor == pytest.approx(4.0, rel=0.01)
        assert any("['w']" in x.name for x in report.different)


def test_adam_is_told_to_hide_the_scale_where_its_state_is_not_returned() -> None:
    tx = optax.adam(0.01)
    inner = _step(tx, _mean, "sum")

    def step(state: Any, batch: Any) -> Any:
        return inner(state, batch)[0][0]

    report = FOUR.check_gradients(step, ((PARAMS, tx.init(PARAMS)), _batch()))
    assert "adaptive" in repr(report)
    assert "a function that returns the all-reduced gradients" in repr(report)


@pytest.mark.parametrize("size", [1.0, 1e-5], ids=["large", "small_beside_the_parameters"])
@pytest.mark.parametrize(("op", "factor"), [("mean", 1.0), ("sum", 4.0)])
def test_returned_gradients_are_compared_as_they_are(op: str, factor: float, size: float) -> None:
    def grads(params: Any, batch: Any) -> Any:
        found = jax.grad(lambda p: size * _errors(p, batch).mean())(params)
        return get_replica_context().all_reduce(op, found)

    report = _four().check_gradients(grads, (PARAMS, _batch()))
    assert report.factor == pytest.approx(factor, rel=0.01)
    assert {x.name for x in report.leaves} == {"result['w']", "result['b']"}
    assert report.is_equal == (factor == 1.0)


class Net(nnx.Module):
    """Two layers with what is asked for between them."""

    def __init__(self, *between: Any) -> None:
        self.first = nnx.Linear(3, 8, rngs=nnx.Rngs(0))
        self.between = nnx.List(between)
        self.last = nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.first(x))
        for layer in self.between:
            x = layer(x)
        return self.last(x)


def _nnx_step(op: str) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        def loss_of(model: Any) -> Any:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        grads = nnx.grad(loss_of)(model)
        optimizer.update(model, get_replica_context().all_reduce(op, grads))

    return step


@pytest.mark.parametrize(("op", "factor"), [("mean", 1.0), ("sum", 4.0)])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_nnx_objects_are_compared_by_variable_and_left_untouched(
    name: str, op: str, factor: float
) -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name], wrt=nnx.Param)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state((model, optimizer))))
    report = _four().check_gradients(_nnx_step(op), (model, optimizer, _batch()))
    assert report.factor == pytest.approx(factor, rel=0.01)
    assert "args[0].first.kernel" in {x.name for x in report.leaves}
    after = nnx.to_pure_dict(nnx.state((model, optimizer)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: nnx.BatchNorm(8, rngs=nnx.Rngs(0)), "BatchStat"),
        (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "nn.example_keys"),
    ],
    ids=["batch_norm", "dropout"],
)
def test_no_uniform_factor_names_the_kinds_of_variables_that_may_do_it(
    make: Any, word: str
) -> None:
    model = Net(make())
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step, strategy = _nnx_step("mean"), _four()
    report = strategy.check_gradients(step, (model, optimizer, _batch()))
    assert not report.is_equal
    assert not report.is_uniform
    assert "No single factor" in repr(report)
    assert word in repr(report)

    model.eval()
    assert strategy.check_gradients(step, (model, optimizer, _batch())).is_equal


def test_metrics_are_compared_too() -> None:
    metric: Any = nnx.metrics.Average()

    def right(metric: Any, x: Any) -> None:
        metric.update(values=x)

    def twice(metric: Any, x: Any) -> None:
        metric.update(values=get_replica_context().all_gather(x, axis=0))

    x = jax.device_put(np.arange(8, dtype=np.float32), FOUR.per_replica_sharding)
    assert FOUR.check_gradients(right, (metric, x)).is_equal
    assert FOUR.check_gradients(twice, (metric, x)).factor == 4
    assert int(metric.count[...]) == 0


def test_gradients_that_were_not_reduced_are_told() -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: _errors(p, batch).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxdist.errors.StateDivergenceWarning)
        report = FOUR.check_gradients(step, (PARAMS, _batch()))
    assert not report.is_equal
    assert "different on each replica" in repr(report)
    assert "all-reduce them first" in repr(report)


@pytest.mark.parametrize("form", ["one_by_one", "global"])
def test_per_replica_values_are_joined_on_dim_0(form: str) -> None:
    shapes: list[tuple[int, ...]] = []
    rows = np.arange(8, dtype=np.float32)
    value = PerReplica(list(rows.reshape(4, 2)))
    if form == "global":
        value = FOUR.run(lambda v: v, (value,))

    def step(w: Any, x: Any) -> Any:
        shapes.append(x.shape)
        return w - get_replica_context().all_reduce("mean", x.mean())

    FOUR.check_gradients(step, (1.0, value)).raise_if_different()
    assert shapes == [(2,), (8,)]


def test_a_scalar_on_each_replica_has_no_rows_and_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - get_replica_context().all_reduce("mean", x)

    with pytest.raises(jaxdist.errors.ShapeError, match=r"(?s)args\[1\].*shape \[1\]"):
        FOUR.check_gradients(step, (1.0, PerReplica([1.0, 2.0, 3.0, 4.0])))
    same = PerReplica([2.0, 2.0, 2.0, 2.0])
    assert FOUR.check_gradients(step, (1.0, same)).is_equal


def test_empty_replicas_that_count_in_the_mean_give_n_over_b() -> None:
    # Two full replicas of four: N/B is 4/8.
    mask = np.array([True] * 4 + [False] * 4)

    def step(params: Any, batch: Any, mask: Any) -> Any:
        def loss_of(params: Any) -> Any:
            real = jnp.maximum(mask.sum(), 1)
            return (_errors(params, batch) * mask).sum() / real

        grads = get_replica_context().all_reduce("mean", jax.grad(loss_of)(params))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    given = (PARAMS, _batch(), jax.device_put(mask, FOUR.per_replica_sharding))
    report = FOUR.check_gradients(step, given)
    assert report.factor == pytest.approx(0.5, rel=0.01)
    assert "4/8 is N/B" in repr(report)
    assert "global_batch_size" in repr(report)

    uneven = np.array([True, False, True, True, True, True, False, False])
    given = (PARAMS, _batch(), jax.device_put(uneven, FOUR.per_replica_sharding))
    report = FOUR.check_gradients(step, given)
    assert not report.is_uniform
    assert "the batch is uneven" in repr(report)


def _by_default_size(params: Any, x: Any, y: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return compute_average_loss(_errors(params, {"x": x, "y": y}))

    return get_replica_context().all_reduce("sum", jax.grad(loss_of)(params))


def _by_replica(params: Any, x: Any, y: Any) -> Any:
    grads = jax.grad(lambda p: _errors(p, {"x": x, "y": y}).mean())(params)
    return get_replica_context().all_reduce("mean", grads)


def _by_example(params: Any, x: Any, y: Any) -> Any:
    context = get_replica_context()
    size = context.all_reduce("sum", jnp.asarray(x.shape[0]))

    def loss_of(params: Any) -> Any:
        return compute_average_loss(_errors(params, {"x": x, "y": y}), global_batch_size=size)

    return context.all_reduce("sum", jax.grad(loss_of)(params))


@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
@pytest.mark.parametrize(
    ("fn", "is_right"), [(_by_default_size, False), (_by_replica, False), (_by_example, True)]
)
def test_values_of_different_lengths_are_joined_and_weighting_by_replica_is_told(
    fn: Any, is_right: bool
) -> None:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x, y = (PerReplica([v[:3], v[3:4]]) for v in (BATCH["x"], BATCH["y"]))
    report = two.check_gradients(fn, (PARAMS, x, y))
    assert report.is_equal == is_right
    assert ("the batch is uneven" in repr(report)) == (not is_right)


def test_the_right_way_for_uneven_batches_is_equal() -> None:
    mask = np.array([True, False, True, True, True, True, False, False])

    def step(params: Any, batch: Any, mask: Any) -> Any:
        context = get_replica_context()
        size = context.all_reduce("sum", mask.sum())

        def loss_of(params: Any) -> Any:
            return compute_average_loss(_errors(params, batch), mask, global_batch_size=size)

        grads = context.all_reduce("sum", jax.grad(loss_of)(params))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    given = (PARAMS, _batch(), jax.device_put(mask, FOUR.per_replica_sharding))
    FOUR.check_gradients(step, given).raise_if_different()


def test_a_strategy_in_the_closure_is_told_to_be_a_possible_cause() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            errors = _errors(params, batch)
            return errors.sum() / (errors.size * FOUR.num_replicas_in_sync)

        return get_replica_context().all_reduce("sum", jax.grad(loss_of)(params))

    report = FOUR.check_gradients(step, (PARAMS, _batch()))
    assert "closes over a strategy (FOUR)" in repr(report)
    assert "get_replica_context()" in repr(report)


@pytest.mark.parametrize("num_variables", [0, 1])
def test_nothing_is_donated_and_the_program_is_that_of_run(num_variables: int) -> None:
    # Where variables are alive, the step is looked through for them first.
    alive = [jaxdist.Variable(1.0) for _ in range(num_variables)]
    traces = []

    def step(params: Any, batch: Any) -> Any:
        traces.append(1)
        grads = jax.grad(lambda p: _errors(p, batch).mean())(params)
        grads = get_replica_context().all_reduce("mean", grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jax.device_put(PARAMS, FOUR.replicated_sharding)
    batch = _batch()
    FOUR.check_gradients(step, (params, batch), options=RunOptions(donate_argnums=(0, 1)))
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, batch)))
    assert len(traces) == 2
    FOUR.run(step, (params, batch))
    assert len(traces) == 2
    assert len(alive) == num_variables


def test_static_arguments_keyword_arguments_and_axes_by_name_work() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))

    def step(w: Any, x: Any, *, times: int, mode: str) -> Any:
        for _ in range(times):
            w = w - 0.1 * jax.lax.pmean((w * x).mean(), "data")
        return w if mode == "train" else None

    x = jax.device_put(np.arange(8, dtype=np.float32), strategy.per_replica_sharding)
    report = strategy.check_gradients(
        step, (1.0, x), {"times": 2, "mode": "train"}, RunOptions(static_argnames=("times",))
    )
    assert report.is_equal


def test_it_works_in_the_scope_and_is_refused_in_a_replica() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - get_replica_context().all_reduce("mean", x.mean())

    x = jax.device_put(np.arange(8, dtype=np.float32), FOUR.per_replica_sharding)
    with FOUR.scope():
        assert FOUR.check_gradients(step, (1.0, x)).is_equal
    with pytest.raises(jaxdist.errors.ContextError, match="check_gradients was called inside"):
        FOUR.run(lambda: FOUR.check_gradients(step, (1.0, x)))


def test_every_strategy_checks_gradients(strategy: jaxdist.Strategy) -> None:
    tx = optax.sgd(0.1)
    num_rows = 2 * strategy.num_replicas_in_sync
    rows = {name: np.resize(v, (num_rows, v.shape[1])) for name, v in BATCH.items()}
    batch = jax.device_put(rows, strategy.per_replica_sharding)
    args = ((PARAMS, tx.init(PARAMS)), batch)
    assert strategy.check_gradients(_step(tx, _mean, "mean"), args).is_equal
    wrong = strategy.check_gradients(_step(tx, _mean, "sum"), args)
    assert wrong.factor == pytest.approx(strategy.num_replicas_in_sync, rel=0.01)


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(jaxdist.errors.ArgumentError, match=r"nothing to compare.*result differ"):
        FOUR.check_gradients(lambda x: x, (_batch()["x"],))


@pytest.mark.parametrize("rtol", [0.0, 1.0, -1e-3, "1e-3", 1])
def test_a_tolerance_that_is_none_is_refused(rtol: Any) -> None:
    with pytest.raises(jaxdist.errors.ArgumentError, match="between 0 and 1"):
        FOUR.check_gradients(lambda w: w, (1.0,), rtol=rtol)


def test_a_structure_that_depends_on_the_number_of_replicas_is_refused() -> None:
    def step(w: Any) -> Any:
        return [w] * get_replica_context().num_replicas_in_sync

    with pytest.raises(jaxdist.errors.ArgumentError, match="another structure"):
        FOUR.check_gradients(step, (1.0,))


def test_values_that_are_not_finite_on_one_side_are_told() -> None:
    def step(w: Any) -> Any:
        count = get_replica_context().num_replicas_in_sync
        return {"w": w / (count - 1), "b": w}

    report = FOUR.check_gradients(step, (1.0,))
    assert [x.name for x in report.different] == ["result['w']"]
    assert "not finite" in repr(report)


def test_parameters_whose_gradient_is_rounding_are_passed_over() -> None:
    # The softmax does not see a constant: its gradient is zero, and computed it is rounding.
    params = {"shift": np.ones(1, np.float32), "w": _RNG.normal(size=3).astype(np.float32)}

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            scores = batch["x"] * params["w"][None] + params["shift"][None]
            return -jnp.log(jax.nn.softmax(scores))[:, 0].mean() * 100

        return get_replica_context().all_reduce("mean", jax.grad(loss_of)(params))

    report = FOUR.check_gradients(step, (params, _batch()))
    assert report.is_equal
    assert [x.name for x in report.leaves if not x.is_resolved] == ["result['shift']"]
    assert "changed by no more than rounding, so not compared: 1" in repr(report)


def test_a_long_list_of_leaves_is_cut() -> None:
    def step(params: Any, batch: Any) -> Any:
        context = get_replica_context()
        # 1 on one device, and 3 on four.
        scale = 1 + 2 * (context.num_replicas_in_sync - 1) / 3
        return context.all_reduce(
            "mean", {k: scale * w * batch["x"].mean() for k, w in params.items()}
        )

    params = {f"w{i}": np.full(1, i + 1, np.float32) for i in range(12)}
    report = FOUR.check_gradients(step, (params, _batch()))
    assert len([x for x in report.leaves if not x.is_equal]) == 12
    assert "and 2 more" in repr(report)
    assert "neither the number of replicas" in repr(report)


@pytest.mark.parametrize("number", [10**30, 2**40])
def test_arguments_are_refused_by_its_name_where_variables_exist_elsewhere(number: int) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    elsewhere = jaxdist.Variable(1.0)
    with pytest.raises(errors.ArgumentError, match=r"^Strategy\.check_gradients was given args"):
        strategy.check_gradients(lambda x: x, ([number],))
    assert float(elsewhere.value()) == 1


def test_a_step_with_variables_is_refused_and_they_stay_as_they_are() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weight = jaxdist.Variable(np.float32(3), name="weight")

    def step() -> Any:
        weight.assign_add(1.0)
        return weight.read_value()

    with pytest.raises(jaxdist.errors.ArgumentError, match="weight"):
        strategy.check_gradients(step)
    assert float(weight) == 3
