"""Errors of a step on a later, uneven batch are raised at the first step of the dataset."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jaxdist
from jaxdist import PerReplica, Variable
from jaxdist.data import InputOptions, batches
from jaxdist.errors import NoRowsError, ShapeError, UnevenMeanWarning

# 84 rows in batches of 32: the last has 20 rows, with these numbers on 8 replicas.
TWENTY = [3, 3, 3, 3, 3, 3, 2, 0]
LAST = "step 3, the last batch of the data (20 rows on 8 replicas)"


def _ctx() -> Any:
    return jaxdist.get_replica_context()


def _data(strategy: Any, num_examples: int = 84, **how: Any) -> Any:
    x = np.arange(2 * num_examples, dtype=np.float32).reshape(num_examples, 2)
    source = batches({"x": x, "y": x[:, 0]}, 32, **how)
    return strategy.experimental_distribute_dataset(source)


class Counted:
    """A step that records the number of rows of each trace."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.rows: list[int] = []

    def __call__(self, w: Any, batch: Any) -> Any:
        self.rows.append(batch["x"].shape[0])
        return self.of(w, batch)


def _mean(w: Any, batch: Any) -> Any:
    return _ctx().all_reduce("mean", jnp.mean(w * batch["x"]))


def _mean_of_sums(w: Any, batch: Any) -> Any:
    return _ctx().all_reduce("mean", jnp.sum(w * batch["x"]))


def _average_by_own_rows(w: Any, batch: Any) -> Any:
    return _ctx().all_reduce("sum", jaxdist.nn.compute_average_loss(w * batch["y"]))


def _sum(w: Any, batch: Any) -> Any:
    return _ctx().all_reduce("sum", jnp.sum(w * batch["x"]))


def _four_rows(w: Any, batch: Any) -> Any:
    return _ctx().all_reduce("sum", jnp.sum(w * batch["x"].reshape(4, 2)))


ONE = np.float32(1)


def _by_run(strategy: Any, step: Any, iterator: Any) -> Any:
    return strategy.run(step, (ONE, next(iterator)))


def _by_function_of_iterator(strategy: Any, step: Any, iterator: Any) -> Any:
    return jaxdist.function(lambda it: strategy.run(step, (ONE, next(it))))(iterator)


def _by_function_of_batch(strategy: Any, step: Any, iterator: Any) -> Any:
    call = jaxdist.function(lambda batch: strategy.run(step, (ONE, batch)))
    return call(next(iterator))


def _by_function_of_batch_and_array(strategy: Any, step: Any, iterator: Any) -> Any:
    call = jaxdist.function(lambda batch, one: strategy.run(step, (one, batch)))
    return call(next(iterator), np.ones((), "float32"))


WAYS = [
    _by_run,
    _by_function_of_iterator,
    _by_function_of_batch,
    _by_function_of_batch_and_array,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_over_no_rows_is_refused_at_the_first_step(way: Any) -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(NoRowsError) as error:
        way(strategy, _mean, iter(_data(strategy)))
    text = str(error.value)
    assert LAST in text
    assert str(TWENTY) in text
    notes = "\n".join(error.value.__notes__)
    assert LAST in notes
    assert "drop_remainder" in notes


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_users_own_names_the_batch(way: Any) -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(TypeError, match="reshape") as error:
        way(strategy, _four_rows, iter(_data(strategy)))
    assert LAST in "\n".join(error.value.__notes__)


@pytest.mark.parametrize("way", WAYS)
def test_an_uneven_mean_is_warned_of_at_the_first_step_and_only_there(way: Any) -> None:
    strategy = jaxdist.MirroredStrategy()
    iterator = iter(_data(strategy))
    with pytest.warns(UnevenMeanWarning) as told:
        way(strategy, _mean_of_sums, iterator)
    assert len(told) == 1
    assert LAST in str(told[0].message)
    assert told[0].filename == __file__
    if way is _by_run:
        for _ in range(2):
            way(strategy, _mean_of_sums, iterator)


@pytest.mark.parametrize("way", WAYS)
def test_an_average_by_the_rows_of_one_replica_is_warned_of_at_the_first_step(way: Any) -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.warns(UnevenMeanWarning) as told:
        way(strategy, _average_by_own_rows, iter(_data(strategy)))
    assert len(told) == 1
    text = str(told[0].message)
    assert LAST in text
    assert "(_average_by_own_rows), where nn.compute_average_loss has no global_batch_size" in text
    assert told[0].filename == __file__


@pytest.mark.parametrize("num_replicas", [3, 8])
@pytest.mark.parametrize("way", ["divided", "times", "divided after"])
def test_a_mean_that_the_step_writes_itself_is_warned_of(way: str, num_replicas: int) -> None:
    def step(w: Any, batch: Any) -> Any:
        loss, count = jnp.mean(w * batch["x"]), _ctx().num_replicas_in_sync
        if way == "divided after":
            return _ctx().all_reduce("sum", loss) / count
        return _ctx().all_reduce("sum", loss / count if way == "divided" else loss * (1 / count))

    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    x = np.arange(46, dtype=np.float32).reshape(23, 2)
    data = strategy.experimental_distribute_dataset(batches({"x": x}, 48))
    with pytest.warns(UnevenMeanWarning, match="takes the mean over the replicas at .*step"):
        strategy.run(step, (ONE, next(iter(data))))


@pytest.mark.parametrize("way", ["divided", "times"])
@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_a_sum_that_is_divided_by_a_number_is_no_mean(way: str, num_replicas: int) -> None:
    def step(w: Any, batch: Any) -> Any:
        squares, number = jnp.sum(w * batch["x"] ** 2), num_replicas
        loss = squares / number if way == "divided" else squares * (1 / number)
        return _ctx().all_reduce("sum", loss)

    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    x = np.arange(46, dtype=np.float32).reshape(23, 2)
    data = strategy.experimental_distribute_dataset(batches({"x": x}, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnevenMeanWarning)
        found = strategy.run(step, (ONE, next(iter(data))))
    np.testing.assert_allclose(np.asarray(found), (x**2).sum() / num_replicas, rtol=1e-6)


@pytest.mark.parametrize("step", ["by all rows", "of equal numbers"])
def test_an_average_that_is_right_on_any_rows_is_not_warned_of(step: str) -> None:
    def by_all_rows(w: Any, batch: Any) -> Any:
        size = _ctx().all_reduce("sum", batch["y"].shape[0])
        loss = jaxdist.nn.compute_average_loss(w * batch["y"], global_batch_size=size)
        return _ctx().all_reduce("sum", loss)

    def of_equal_numbers(w: Any, batch: Any) -> Any:
        sums = jnp.stack([batch["x"].sum(), w * batch["y"].sum()])
        first = jaxdist.nn.compute_average_loss(sums)
        return _ctx().all_reduce("sum", first + jaxdist.nn.compute_average_loss(sums[:1]))

    strategy = jaxdist.MirroredStrategy()
    one = by_all_rows if step == "by all rows" else of_equal_numbers
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnevenMeanWarning)
        for batch in _data(strategy):
            strategy.run(one, (ONE, batch))


def test_traces_of_the_last_batch_are_made_once_and_used_for_it() -> None:
    strategy = jaxdist.MirroredStrategy()
    step = Counted(_sum)
    found: list[float] = []
    for _ in range(2):  # the second pass needs no trace
        for number, batch in enumerate(_data(strategy)):
            found.append(float(strategy.run(step, (ONE, batch))))
            assert step.rows == [4, 3, 2, 0], number
    x = np.arange(168, dtype=np.float32)
    assert found == [x[:64].sum(), x[64:128].sum(), x[128:].sum()] * 2


def test_a_step_that_meets_the_data_late_is_traced_for_the_last_batch_then() -> None:
    strategy = jaxdist.MirroredStrategy()
    iterator = iter(_data(strategy))
    next(iterator)
    with pytest.raises(NoRowsError, match="step 3"):
        strategy.run(_mean, (ONE, next(iterator)))


def test_after_a_position_was_taken_up_the_last_batch_is_the_one_that_comes() -> None:
    strategy = jaxdist.MirroredStrategy()
    iterator = iter(_data(strategy))
    state = iterator.get_state()
    state["steps"], state["source"]["index"] = 7, 70
    iterator.set_state(state)
    step = Counted(_sum)
    strategy.run(step, (ONE, next(iterator)))  # 14 rows: the last batch itself
    assert step.rows == [2, 0]


@pytest.mark.parametrize("num_examples", [64, 80, 96])
def test_nothing_more_is_traced_where_all_batches_are_even(num_examples: int) -> None:
    strategy = jaxdist.MirroredStrategy()
    step = Counted(_mean)
    strategy.run(step, (ONE, next(iter(_data(strategy, num_examples)))))
    assert step.rows == [4]


@pytest.mark.parametrize("how", [{"drop_remainder": True}, {}], ids=["dropped", "not of a dataset"])
def test_nothing_more_is_traced_where_no_uneven_batch_is_known(how: dict[str, Any]) -> None:
    strategy = jaxdist.MirroredStrategy()
    batch = next(iter(_data(strategy, **how)))
    if not how:
        batch = jax.tree.map(lambda x: x, batch)
    step = Counted(_mean)
    strategy.run(step, (ONE, batch))
    assert step.rows == [4]


def test_values_that_may_depend_on_the_rows_are_not_guessed() -> None:
    strategy = jaxdist.MirroredStrategy()

    def weighted(x: Any, weights: Any) -> Any:
        return _ctx().all_reduce("sum", jnp.sum(x * weights[:, None]))

    def ones(x: Any) -> Any:
        return jnp.ones(x.shape[0]) * (_ctx().replica_id_in_sync_group + 1)

    def by_static(x: Any, rows: int) -> Any:
        return _ctx().all_reduce("sum", jnp.sum(x.reshape(rows, 2)))

    for batch in _data(strategy, num_examples=80 + 12):  # 28 rows: 4 on 7 replicas and none
        weights = strategy.run(ones, (batch["y"],))
        found = strategy.run(weighted, (batch["x"], weights))
        pairs = zip(batch["x"].values, weights.values, strict=True)
        wanted = sum(float(np.sum(np.asarray(x) * np.asarray(w)[:, None])) for x, w in pairs)
        np.testing.assert_allclose(float(found), wanted, rtol=1e-5)
    options = jaxdist.RunOptions(static_argnames=("rows",))
    for batch in _data(strategy, num_examples=72):
        local = batch["x"].values[0].shape[0]
        found = strategy.run(by_static, (batch["x"],), {"rows": local}, options)
        wanted = sum(float(np.sum(x)) for x in batch["x"].values)
        np.testing.assert_allclose(float(found), wanted, rtol=1e-5)


class Holder(nnx.Module):
    """State of a step: a count, a statistic and a stream of random numbers."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.int32(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))


def _with_state(holder: Any, variable: Any, batch: Any) -> Any:
    holder.count[...] += 1
    variable.assign_add(1.0)
    out = holder.dropout(holder.norm(batch["x"]))
    return _ctx().all_reduce("sum", out.sum())


@pytest.mark.parametrize("compiled_as_a_whole", [False, True])
def test_state_changes_once_in_each_step(compiled_as_a_whole: bool) -> None:
    strategy = jaxdist.MirroredStrategy()
    holder: Any = Holder()
    with strategy.scope():
        variable = Variable(0.0, name="v")

    def call(holder: Any, batch: Any) -> Any:
        return strategy.run(_with_state, (holder, variable, batch))

    run = jaxdist.function(call) if compiled_as_a_whole else call
    for number, batch in enumerate(_data(strategy), 1):
        run(holder, batch)
        assert float(variable) == number
        assert int(holder.count[...]) == number
        assert int(holder.dropout.rngs.count[...]) == number


def test_state_is_as_it_was_where_the_last_batch_is_refused() -> None:
    strategy = jaxdist.MirroredStrategy()
    holder = Holder()
    with strategy.scope():
        variable = Variable(0.0, name="v")

    def step(holder: Any, variable: Any, batch: Any) -> Any:
        _with_state(holder, variable, batch)
        return _mean(1.0, batch)

    before = jax.tree.map(np.asarray, nnx.state(holder, nnx.Not(nnx.RngKey)))
    iterator = iter(_data(strategy))
    first = next(iterator)
    for _ in range(2):  # as often as it is tried
        with pytest.raises(NoRowsError, match="step 3"):
            strategy.run(step, (holder, variable, first))
    after = jax.tree.map(np.asarray, nnx.state(holder, nnx.Not(nnx.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert float(variable) == 0
    strategy.run(_with_state, (holder, variable, first))
    assert float(variable) == 1


def test_variables_that_only_the_last_batch_touches_are_inputs_of_it_alone() -> None:
    strategy = jaxdist.MirroredStrategy()
    with strategy.scope():
        variable = Variable(5.0, name="v")

    def step(batch: Any) -> Any:
        total = batch["x"].sum()
        if batch["x"].shape[0] < 4:
            total = total + variable.read_value()
        return _ctx().all_reduce("sum", total)

    x = np.arange(168, dtype=np.float32)
    expected = [x[:64].sum(), x[64:128].sum(), x[128:].sum() + 8 * 5]
    for run in (jaxdist.function(lambda b: strategy.run(step, (b,))), None):
        found = [
            float(strategy.run(step, (b,)) if run is None else run(b)) for b in _data(strategy)
        ]
        assert found == expected


def test_a_function_that_takes_two_batches_is_refused_at_its_first_call() -> None:
    strategy = jaxdist.MirroredStrategy()

    @jaxdist.function
    def two(iterator: Any) -> Any:
        return [strategy.run(_mean, (ONE, next(iterator))) for _ in range(2)]

    iterator = iter(_data(strategy, num_examples=116))
    with pytest.raises(NoRowsError, match="step 4"):
        two(iterator)
    assert iterator.get_state()["steps"] == 0


def test_two_iterators_with_other_ends_are_not_mixed_up() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any, y: Any) -> Any:
        return _ctx().all_reduce("sum", jnp.sum(x["x"] * y["x"]))

    for x, y in zip(_data(strategy, 84), _data(strategy, 100), strict=False):
        if x["x"].is_global:
            found = strategy.run(step, (x, y))
            pairs = zip(x["x"].values, y["x"].values, strict=True)
            wanted = sum(float(np.sum(np.asarray(a) * np.asarray(b))) for a, b in pairs)
            np.testing.assert_allclose(float(found), wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", ["virtual", "logical"])
def test_replicas_of_one_shape_refuse_the_last_batch_at_the_first_step(kind: str) -> None:
    strategy = (
        jaxdist.MirroredStrategy(deterministic=True)
        if kind == "virtual"
        else jaxdist.MirroredStrategy(
            mesh=Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model")),
            replica_axes=("data",),
        )
    )
    with pytest.raises(ShapeError, match="drop_remainder") as error:
        strategy.run(_sum, (ONE, next(iter(_data(strategy, num_examples=65)))))
    assert "step 3, the last batch of the data (1 rows on" in "\n".join(error.value.__notes__)


def test_batches_of_single_replicas_are_foreseen_too() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = np.arange(40, dtype=np.float32)
    data = strategy.distribute_datasets_from_function(lambda _: batches({"x": x}, 4))
    with pytest.raises(NoRowsError, match=r"step 2, the last batch of the data \(8 rows"):
        strategy.run(_mean, (ONE, next(iter(data))))


def test_batches_that_stay_on_the_host_are_foreseen_too() -> None:
    strategy = jaxdist.MirroredStrategy()
    source = batches({"x": np.ones((84, 2), np.float32)}, 32)
    options = InputOptions(experimental_fetch_to_device=False)
    step = Counted(_sum)
    for batch in strategy.experimental_distribute_dataset(source, options):
        strategy.run(step, (ONE, batch))
        assert step.rows == [4, 3, 2, 0]


def test_other_dtypes_of_other_arguments_do_not_trace_the_last_batch_again() -> None:
    strategy = jaxdist.MirroredStrategy()
    iterator = iter(_data(strategy))
    step = Counted(_sum)
    strategy.run(step, (1.0, next(iterator)))  # a weak type
    strategy.run(step, (ONE, next(iterator)))
    assert step.rows == [4, 3, 2, 0, 4]


def test_nothing_is_looked_at_before_where_steps_run_op_by_op_or_are_only_lowered() -> None:
    strategy = jaxdist.MirroredStrategy()
    batch = next(iter(_data(strategy)))
    with jaxdist.config.run_eagerly(True):
        strategy.run(_mean, (ONE, batch))
    strategy.lower(_mean, (ONE, batch))
    with pytest.raises(NoRowsError):
        strategy.run(_mean, (ONE, batch))


def test_a_trace_of_somebody_else_knows_nothing_of_later_batches() -> None:
    strategy = jaxdist.MirroredStrategy()
    batch = next(iter(_data(strategy)))
    step = Counted(_mean)
    jax.jit(lambda b: strategy.run(step, (ONE, b)))(batch)
    jax.jit(lambda: strategy.run(step, (ONE, batch)))()
    assert step.rows == [4, 4]


def test_values_of_replicas_made_by_hand_have_no_later_batches() -> None:
    strategy = jaxdist.MirroredStrategy()
    step = Counted(_mean)
    strategy.run(step, (ONE, {"x": PerReplica(list(np.ones((8, 4, 2), np.float32)))}))
    assert step.rows == [4]
