"""`jaxdist.function`: a whole function compiled, with the variables that it uses."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import (
    PerReplica,
    Strategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from jaxdist.errors import (
    ArgumentTypeError,
    ContextError,
    InputContextError,
    MixedStrategyError,
    OutOfRangeError,
)
from tests.program.run.counting import compilations

ROWS = np.arange(24.0, dtype=np.float32).reshape(24, 1)


@pytest.fixture
def two() -> Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _loop(strategy: Strategy, wrap: Callable[..., Any]) -> list[Any]:
    """A training loop in the manner of `tf.distribute`: losses, and what the variables hold."""
    with strategy.scope():
        w = Variable(np.ones(1, np.float32), name="w")
        seen = Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
    calls = Variable(0, name="calls")
    count = strategy.num_replicas_in_sync

    def step(x: Any) -> Any:
        error = x @ w.value() - 3.0
        gradient = get_replica_context().all_reduce("mean", (error[:, None] * x).mean(axis=0))
        w.assign_sub(1e-3 * gradient)
        seen.assign_add(x.sum())
        return (error**2).mean()

    def train(x: Any, scale: float, name: str) -> Any:
        losses = strategy.run(step, (x,))
        calls.assign_add(1)
        total = seen.read_value()
        return {"loss": strategy.reduce("MEAN", losses, axis=None) * scale, "seen": total}, name

    call = wrap(train)
    rows = PerReplica(list(ROWS.reshape(count, -1, 1)))
    x = strategy.run(lambda v: v, (rows,))
    found: list[Any] = []
    for scale in (1.0, 2.0, 3.0):
        result, name = call(x, scale, "plain")
        assert name == "plain"
        found += [float(result["loss"]), float(result["seen"])]
    return [*found, *w.numpy().tolist(), float(seen), int(calls)]


def test_a_training_loop_gives_what_it_gives_without_it(strategy: Strategy) -> None:
    plain = _loop(strategy, lambda f: f)
    compiled = _loop(strategy, jaxdist.function)
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)
    assert compiled[-1] == 3
    assert compiled[-2] == pytest.approx(3 * ROWS.sum())


def test_a_loop_over_variables_is_traced_once_with_its_steps_and_compiled_once(
    two: Strategy,
) -> None:
    with two.scope():
        w, unread = Variable(1.0), Variable(0.0)
    steps = []

    def step(x: Any) -> Any:
        steps.append(1)
        unread.assign(2.0)
        return get_replica_context().all_reduce("sum", x * w)

    @jaxdist.function
    def train(x: Any) -> Any:
        total = two.run(step, (x,))
        w.assign_add(1.0)
        return total

    x = two.run(lambda x: x, (PerReplica([1.0, 2.0]),))
    assert float(train(x)) == 3.0
    assert (train.experimental_get_tracing_count(), len(steps)) == (1, 1)
    with compilations() as compiled:
        assert [float(train(x)) for _ in range(20)] == [3.0 * n for n in range(2, 22)]
    assert compiled.number == 0
    assert (train.experimental_get_tracing_count(), len(steps)) == (1, 1)
    train(two.run(lambda x: jnp.stack([x, x]), (PerReplica([1.0, 2.0]),)))
    assert (train.experimental_get_tracing_count(), len(steps)) == (2, 2)
    assert float(unread) == 2.0


def test_shapes_that_lead_to_other_variables_are_traced_once_each() -> None:
    first, second = Variable(0.0), Variable(0.0)

    @jaxdist.function
    def add(x: Any) -> Any:
        (first if x.ndim else second).assign_add(x.sum())
        return first + second

    values = [np.float32(1), np.ones(2, np.float32), np.ones(3, np.float32), np.float32(1)]
    assert [float(add(x)) for x in values] == [1.0, 3.0, 6.0, 7.0]
    assert (float(first), float(second)) == (5.0, 2.0)
    assert add.experimental_get_tracing_count() <= 4


def test_variables_of_no_strategy_work_without_one() -> None:
    total, count = Variable(np.zeros(3, np.float32)), Variable(0)

    @jaxdist.function
    def add(x: Any, *, twice: bool = False) -> Any:
        total.assign_add(2 * x if twice else x)
        count.assign_add(1)
        return total.value().sum()

    assert float(add(np.ones(3, np.float32))) == 3.0
    assert float(add(np.ones(3, np.float32), twice=True)) == 9.0
    assert total.numpy().tolist() == [3.0, 3.0, 3.0]
    assert int(count) == 2
    assert len(total.value().devices()) == 1


def test_other_arguments_may_lead_to_other_variables() -> None:
    a, b = Variable(0.0, name="a"), Variable(0.0, name="b")

    @jaxdist.function
    def add(x: Any, which: str) -> Any:
        (a if which == "a" else b).assign_add(x.sum())
        if x.ndim > 1:
            a.assign_add(100.0)
            return b.value()
        return a.value()

    assert float(add(np.ones(2, np.float32), "a")) == 2.0
    assert float(add(np.ones(3, np.float32), "b")) == 2.0
    assert float(add(np.ones((2, 2), np.float32), "b")) == 7.0
    assert (float(a), float(b)) == (102.0, 7.0)


def test_modules_and_optimizers_are_updated_in_place(two: Strategy) -> None:
    def trained(wrap: Callable[..., Any]) -> tuple[list[float], np.ndarray]:
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 3 * x) ** 2).mean())(model)
            optimizer.update(model, get_replica_context().all_reduce("mean", grads))
            return get_replica_context().all_reduce("mean", loss)

        def train(model: Any, optimizer: Any, x: Any) -> Any:
            two.run(step, (model, optimizer, x))
            return two.run(step, (model, optimizer, x))

        call = wrap(train)
        x = two.run(lambda v: v, (PerReplica(list(ROWS.reshape(2, 12, 1) / 24)),))
        losses = [float(call(model, optimizer, x)) for _ in range(3)]
        return losses, np.asarray(model.kernel[...])

    plain, compiled = trained(lambda f: f), trained(jaxdist.function)
    np.testing.assert_allclose(compiled[0], plain[0], rtol=1e-5)
    np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-5)


def test_gather_and_variables_by_replica_work_inside(two: Strategy) -> None:
    with two.scope():
        own = Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN,
        )

    @jaxdist.function
    def both(x: Any) -> Any:
        own.assign(x)
        doubled = two.run(lambda v: jnp.stack([v, own * 2]), (x,))
        return two.gather(doubled, axis=0), two.reduce("SUM", own, axis=None), own.value()

    x = two.run(lambda x: x, (PerReplica([1.0, 3.0]),))
    whole, total, mean = both(x)
    assert whole.tolist() == [1.0, 2.0, 3.0, 6.0]
    assert (float(total), float(mean)) == (4.0, 2.0)
    assert [float(v) for v in own.values] == [1.0, 3.0]


def test_inside_a_step_another_function_or_a_transformation_it_is_the_function_itself(
    two: Strategy,
) -> None:
    with two.scope():
        w = Variable(2.0, aggregation=VariableAggregation.SUM)

    @jaxdist.function
    def scaled(x: Any) -> Any:
        return x * w

    @jaxdist.function
    def outer(x: Any) -> Any:
        w.assign_add(1.0)
        return scaled(x)

    own = two.run(scaled, (PerReplica([1.0, 2.0]),))
    assert [float(v) for v in own.values] == [2.0, 4.0]
    assert float(outer(1.0)) == 3.0
    assert scaled.experimental_get_tracing_count() == 0
    assert float(scaled(1.0)) == 3.0
    assert float(jax.grad(lambda x: scaled(x))(1.0)) == 3.0


def test_uneven_values_eager_steps_and_disabled_jit_run_the_python_function(
    two: Strategy,
) -> None:
    seen: list[Any] = []
    calls = Variable(0)

    @jaxdist.function
    def total(x: Any) -> Any:
        seen.append(type(x).__name__)
        calls.assign_add(1)
        return two.reduce("SUM", x, axis=0)

    uneven = PerReplica([np.ones((1, 2), np.float32), np.ones((2, 2), np.float32)])
    assert total(uneven).tolist() == [3.0, 3.0]
    with jaxdist.config.run_eagerly():
        assert total(uneven).tolist() == [3.0, 3.0]
    with jax.disable_jit():
        assert total(uneven).tolist() == [3.0, 3.0]
    assert total.experimental_get_tracing_count() == 0
    assert int(calls) == 3


def test_static_arguments_methods_and_the_decorator_with_options() -> None:
    class Counter:
        def __init__(self) -> None:
            self.value = Variable(0.0)

        @jaxdist.function
        def add(self, x: Any) -> Any:
            self.value.assign_add(x)
            return self.value.value()

    @jaxdist.function(static_argnames=("times",))
    def repeated(x: Any, times: int) -> Any:
        return [x] * times, times, None, "text"

    counters = [Counter() for _ in range(5)]
    for number, counter in enumerate(counters):
        assert float(counter.add(float(number))) == number
    # Each object has variables of its own, and is compiled with these alone.
    assert Counter.add.experimental_get_tracing_count() == len(counters)
    counter, other = Counter(), Counter()
    assert [float(counter.add(1.0)), float(counter.add(2.0)), float(other.add(5.0))] == [1, 3, 5]
    values, times, nothing, text = repeated(1.0, 3)
    assert ([float(v) for v in values], times, nothing, text) == ([1.0] * 3, 3, None, "text")
    assert len(repeated(1.0, times=2)[0]) == 2
    assert repeated.python_function(1.0, 1)[1] == 1
    assert "repeated" in repr(repeated)


def test_a_function_that_fails_changes_nothing() -> None:
    w = Variable(1.0)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])

    @jaxdist.function
    def fails(model: Any, x: Any) -> Any:
        w.assign(x)
        model.kernel[...] = model.kernel[...] + 1
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        fails(model, 5.0)
    assert float(w) == 1.0
    np.testing.assert_array_equal(model.kernel[...], before)


def test_what_cannot_be_compiled_says_what_to_do(two: Strategy) -> None:
    made: list[Variable] = []
    dataset = two.experimental_distribute_dataset([np.ones((2, 1))])
    iterator = iter(dataset)

    def makes(x: Any) -> Any:
        made.append(Variable(1.0))
        return x

    def reads(x: Any) -> Any:
        return next(iterator)

    with pytest.raises(ContextError, match=r"made inside a jaxdist\.function"):
        jaxdist.function(makes)(1.0)
    with pytest.raises(ContextError, match=r"train_step\(next\(iterator\)\)"):
        jaxdist.function(reads)(1.0)
    with pytest.raises(ArgumentTypeError, match="returned an NNX object as result"):
        jaxdist.function(lambda m: m)(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(ArgumentTypeError):
        jaxdist.function(3)  # type: ignore[call-overload]
    assert next(iterator) is not None
    iterator.close()


def _numbers(strategy: Strategy, *sizes: int) -> Any:
    batches = [10.0 * i + np.arange(n, dtype=np.float32) for i, n in enumerate(sizes)]
    return strategy.experimental_distribute_dataset(batches)


def _sum_of_two(a: Any, b: Any) -> Any:
    return a.sum() + 100 * b.sum()


def _sums_two(strategy: Strategy) -> Any:
    def train_step(iterator: Any) -> Any:
        first, second = next(iterator), iterator.get_next()
        sums = strategy.run(_sum_of_two, (first, second))
        return strategy.reduce("sum", sums, axis=None)

    return train_step


def test_iterator_that_is_an_argument_gives_new_batches_at_each_call(two: Strategy) -> None:
    train_step = jaxdist.function(_sums_two(two))
    found, expected = [], []
    for _ in range(2):
        with iter(_numbers(two, 4, 4, 4, 4, 4)) as ours, iter(_numbers(two, 4, 4, 4, 4)) as theirs:
            found += [float(train_step(ours)) for _ in range(2)]
            expected += [float(_sums_two(two)(theirs)) for _ in range(2)]
            with pytest.raises(OutOfRangeError, match=r"2 batch.*ended: 1 were left"):
                train_step(ours)
            np.testing.assert_array_equal(two.gather(next(ours), 0), 40 + np.arange(4))
    assert found == expected
    # Not again for the iterator of another pass.
    assert train_step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("rows", [(3,), (4, 3), (4, 4, 3), (4, 4, 4, 4, 1)])
def test_data_that_ends_with_an_uneven_batch_ends_a_function_as_other_data_does(
    two: Strategy, rows: tuple[int, ...]
) -> None:
    train_step = jaxdist.function(_sums_two(two))
    with iter(_numbers(two, *rows)) as iterator, iter(_numbers(two, *rows)) as plain:
        for _ in range(len(rows) // 2):
            assert float(train_step(iterator)) == float(_sums_two(two)(plain))
        with pytest.raises(OutOfRangeError, match="the dataset has ended"):
            train_step(iterator)


def test_uneven_batches_of_an_argument_run_as_they_are(two: Strategy) -> None:
    @jaxdist.function
    def train_step(iterator: Any, scale: Any) -> Any:
        sums = two.run(lambda x: x.sum(), (next(iterator),))
        return scale * two.reduce("sum", sums, axis=None)

    with iter(_numbers(two, 4, 3, 4)) as iterator:
        assert [float(train_step(iterator, 2.0)) for _ in range(3)] == [12.0, 66.0, 172.0]
    with iter(_numbers(two, 3, 4)) as iterator:
        assert [float(train_step(iterator, 2.0)) for _ in range(2)] == [6.0, 92.0]


def test_number_of_batches_may_depend_on_shapes(two: Strategy) -> None:
    @jaxdist.function
    def train_step(batches: dict[str, Any], x: Any) -> Any:
        sums = [two.run(lambda x: x.sum(), (next(batches["it"]),)) for _ in range(len(x))]
        return sum(two.reduce("sum", s, axis=None) for s in sums)

    with iter(_numbers(two, *[2] * 8)) as iterator:
        counts = [1, 2, 1, 2, 2]
        found = [float(train_step({"it": iterator}, np.ones(k))) for k in counts]
        assert iterator.get_state()["steps"] == 8
    each = [20.0 * i + 1 for i in range(8)]
    assert found == [sum(each[sum(counts[:i]) :][:k]) for i, k in enumerate(counts)]


def test_call_that_fails_gives_its_batches_back(two: Strategy) -> None:
    @jaxdist.function
    def loops(iterator: Any) -> Any:
        for batch in iterator:
            two.run(lambda x: x, (batch,))

    @jaxdist.function
    def fails(iterator: Any, times: Any) -> Any:
        for _ in range(len(times)):
            next(iterator)
        raise KeyError("in the function")

    @jaxdist.function
    def transforms(iterator: Any) -> Any:
        return jax.jit(lambda: next(iterator))()

    endless = two.experimental_distribute_dataset(itertools.repeat(np.ones(2)))
    with iter(_numbers(two, 2, 2, 2)) as iterator, iter(endless) as without_end:
        for times in range(4):
            with pytest.raises(KeyError):
                fails(iterator, np.ones(times))
        with pytest.raises(OutOfRangeError, match=r"4 batch.*3 were left"):
            loops(iterator)
        with pytest.raises(ContextError, match="more than 100 batches"):
            loops(without_end)
        with pytest.raises(ContextError, match="inside a transformation"):
            transforms(iterator)
        with pytest.raises(InputContextError, match="Pass the iterator to it"):
            jaxdist.function(lambda: next(iterator))()
        assert iterator.get_state()["steps"] == 0
        assert jax.tree.leaves(iterator.element_spec)[0].shape == (1,)
        found = [float(two.reduce("sum", batch, axis=0)) for batch in iterator]
    assert found == [1.0, 21.0, 41.0]


def test_parts_on_different_devices_are_named(two: Strategy) -> None:
    others = jaxdist.MirroredStrategy(["cpu:2", "cpu:3"])

    @jaxdist.function
    def both(x: Any) -> Any:
        return two.run(lambda x: x + 1, (x,)), others.run(lambda x: x + 1, (x,))

    with pytest.raises(MixedStrategyError, match=r"both has parts .* 0, 1 and .* 2, 3"):
        both(jnp.ones(2))
    with two.scope():
        first = Variable(1.0)
    with others.scope():
        second = Variable(2.0)

    @jaxdist.function
    def added() -> Any:
        first.assign_add(1.0)
        return first + second

    with pytest.raises(MixedStrategyError, match=r"0, 1 and .* 2, 3"):
        added()
    assert float(first) == 1


def test_arguments_mean_what_their_layouts_say(two: Strategy) -> None:
    rows = jax.device_put(np.arange(4, dtype=np.float32), two.per_replica_sharding)
    same = jax.device_put(np.full(1, 3, np.float32), two.replicated_sharding)
    host = two.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )
    with two.scope():
        v = Variable(np.ones(1, np.float32))

    def total(y: Any) -> Any:
        return y.sum()

    def whole(x: Any) -> Any:
        return two.run(total, (x,))

    calls: list[tuple[Callable[..., Any], Any]] = [
        (whole, rows),
        (whole, same),
        (lambda x: two.reduce("sum", whole(x), axis=None), rows),
        (lambda x: two.reduce("sum", x, axis=None), rows),
        (lambda x: two.reduce("mean", x, axis=0), rows),
        (lambda x: two.reduce("sum", x, axis=None), same),
        (lambda x: two.reduce("sum", x, axis=None), host),
        (lambda x: two.gather(x, axis=0), rows),
        (lambda x: two.gather(x, axis=0), same),
        (lambda x: two.gather(v, axis=0), same),
    ]
    for call, x in calls:
        plain, compiled = call(x), jaxdist.function(call)(x)
        assert type(plain) is type(compiled)
        for have, want in zip(jax.tree.leaves(compiled), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(have, want)
    for undistributed in (3.0, np.float32(3), jnp.float32(3)):
        with pytest.raises(ValueError, match="not distributed"):
            jaxdist.function(lambda x: two.reduce("sum", x, axis=None))(undistributed)


def test_what_belongs_outside_is_named(two: Strategy) -> None:
    with two.scope():
        v = Variable(1.0, name="v")
    inside: list[Callable[[Any], Any]] = [
        lambda x: jax.lax.cond(x > 0, lambda: v.assign_add(1.0), lambda: v.value()),
        lambda x: jax.jit(lambda y: v.assign(y))(x),
        lambda x: two.experimental_local_results(v),
        lambda x: v.values,
    ]
    for call in inside:
        with pytest.raises(ContextError, match=r"jaxdist\.function"):
            jaxdist.function(call)(1.0)
    assert float(v) == 1.0
    assert jaxdist.function(lambda x: v)(1.0) is v


def test_arguments_of_another_shape_may_change_another_variable() -> None:
    vector, matrix = Variable(0.0), Variable(0.0)
    add = jaxdist.function(lambda x: (vector if x.ndim == 1 else matrix).assign_add(x.sum()))
    for shape in ((2,), (2, 2), (2,), (3,), (3, 3)):
        add(jnp.ones(shape))
    assert (float(vector), float(matrix)) == (7.0, 13.0)


def test_a_plain_jit_is_told_to_be_a_function(two: Strategy) -> None:
    w = Variable(1.0)
    with pytest.raises(ContextError, match=r"jaxdist\.function"):
        jax.jit(lambda x: w.assign_add(x))(1.0)
    with pytest.raises(ContextError, match=r"jaxdist\.function"):
        jax.jit(lambda x: two.run(lambda v: w * v, (x,)))(1.0)
