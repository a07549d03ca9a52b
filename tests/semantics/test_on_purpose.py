"""What differs from `tf.distribute` on purpose, by the numbers of `coming-from-tf-distribute.md`.

One short test for each; what belongs to it is tested in detail where its subject is.
"""

import pathlib
import re
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable, VariableAggregation, get_replica_context
from jaxdist.errors import (
    ArgumentError,
    DivergentCollectiveError,
    NoRowsError,
    StateDivergenceError,
)

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "porting" / "coming-from-tf-distribute.md").read_text()


@pytest.fixture
def two() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _ids() -> Any:
    return get_replica_context().replica_id_in_sync_group


def test_1_results_that_are_proved_equal_are_plain(two: jaxdist.Strategy) -> None:
    def step(x: Any) -> Any:
        return x, get_replica_context().all_reduce("sum", x), 7, "name"

    own, total, number, name = two.run(step, (PerReplica([1.0, 3.0]),))
    assert isinstance(own, PerReplica)
    assert isinstance(total, jax.Array)
    assert (float(total), number, name) == (4.0, 7, "name")
    (alone,) = jaxdist.MirroredStrategy(["cpu:0"]).run(lambda x: (x,), (1.0,))
    assert isinstance(alone, jax.Array)


def test_2_the_layout_says_what_a_value_is(two: jaxdist.Strategy) -> None:
    mirrored = jax.device_put(3.0, two.replicated_sharding)
    rows = jax.device_put(np.arange(4.0), two.per_replica_sharding)
    assert float(two.reduce("sum", mirrored, axis=None)) == 6
    assert [v.tolist() for v in two.unwrap(rows)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="not distributed"):
        two.reduce("sum", 3.0, axis=None)


def test_3_the_mean_of_integers_is_of_jaxs_float_type(two: jaxdist.Strategy) -> None:
    mean = two.reduce("mean", PerReplica([np.int32(1), np.int32(2)]), axis=None)
    assert (float(mean), mean.dtype) == (1.5, jnp.result_type(float))


def test_4_copies_of_a_mirrored_variable_never_differ(two: jaxdist.Strategy) -> None:
    with two.scope():
        w = Variable(1.0, name="w")
    two.run(lambda: w.assign(get_replica_context().all_reduce("sum", 1.0)))
    assert float(w) == 2
    with pytest.raises((StateDivergenceError, ArgumentError), match="w"):
        two.run(lambda: w.assign(jnp.float32(_ids())))
    assert float(w) == 2


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, np.complex64])
def test_5_gathers_take_every_dtype_and_negative_axes(two: jaxdist.Strategy, dtype: Any) -> None:
    value = PerReplica([np.zeros((2, 1), dtype), np.ones((2, 2), dtype)])
    assert two.gather(value, axis=-1).shape == (2, 3)
    assert two.gather(value, axis=-1).dtype == dtype


def test_6_collectives_are_allowed_in_branches_that_replicas_take_alike(
    two: jaxdist.Strategy,
) -> None:
    def step(condition: Any, x: Any) -> Any:
        def total() -> Any:
            return get_replica_context().all_reduce("sum", x)

        return jax.lax.cond(condition > 0, total, lambda: x * 0)

    assert float(two.run(step, (1.0, 2.0))) == 4
    with pytest.raises(DivergentCollectiveError):
        two.run(step, (PerReplica([1.0, -1.0]), 2.0))


def test_7_the_first_replica_is_that_of_the_whole_job(two: jaxdist.Strategy) -> None:
    with two.scope():
        w = Variable(0.0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
    two.run(lambda: w.assign(jnp.float32(_ids() + 5)))
    assert [float(v) for v in two.unwrap(w)] == [5, 5]


def test_8_an_incomplete_last_group_is_given_all_the_same(two: jaxdist.Strategy) -> None:
    data = two.distribute_datasets_from_function(lambda _: [np.full(1, i) for i in range(3)])
    steps = [[np.asarray(v).tolist() for v in two.unwrap(batch)] for batch in data]
    assert steps == [[[0], [1]], [[2], []]]


def test_9_slices_are_a_pytree_and_are_concatenated(two: jaxdist.Strategy) -> None:
    parts = [IndexedSlices(np.full((1, 2), r, np.float32), [r]) for r in range(2)]
    total = two.reduce("sum", PerReplica(parts), axis=None)
    assert np.asarray(total.values).tolist() == [[0, 0], [1, 1]]
    assert len(jax.tree.leaves(parts[0])) == 2


def test_10_op_by_op_replica_0_runs_first_between_two_collectives(two: jaxdist.Strategy) -> None:
    order: list[tuple[str, int]] = []

    def step() -> None:
        me = int(_ids())
        order.append(("before", me))
        get_replica_context().all_reduce("sum", 1.0)
        order.append(("after", me))

    with jaxdist.config.run_eagerly(True):
        two.run(step)
    assert order == [("before", 0), ("before", 1), ("after", 0), ("after", 1)]


def test_11_a_spec_is_checked_when_it_is_given(two: jaxdist.Strategy) -> None:
    with pytest.raises(ArgumentError, match="increase"):
        jaxdist.contrib.MultiWorkerAllReduce(
            ["/job:worker/task:0"], 2, [("nccl", 1, 64), ("xring", 1, 64), ("psgpu", 1, -1)]
        )


def test_12_replicas_draw_different_numbers_of_one_stream(two: jaxdist.Strategy) -> None:
    rngs = nnx.Rngs(0)
    drawn = two.run(lambda rngs: jax.random.uniform(rngs()), (rngs,))
    first, second = (float(v) for v in two.unwrap(drawn))
    assert first != second
    keys = two.run(lambda: jaxdist.nn.example_keys(jax.random.key(0), 2))
    alone = jaxdist.get_strategy().run(lambda: jaxdist.nn.example_keys(jax.random.key(0), 4))
    both = np.concatenate([np.asarray(jax.random.key_data(k)) for k in two.unwrap(keys)])
    np.testing.assert_array_equal(both, np.asarray(jax.random.key_data(alone)))


def test_13_there_is_no_replica_context_across_replicas(two: jaxdist.Strategy) -> None:
    seen = []
    with two.scope():
        seen.append(get_replica_context())
    two.run(lambda: get_replica_context().merge_call(lambda _: seen.append(get_replica_context())))
    assert set(seen) == {None}


def test_14_a_mean_over_no_rows_does_not_reach_the_others(two: jaxdist.Strategy) -> None:
    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("mean", jnp.mean(x))

    with pytest.raises(NoRowsError):
        two.run(step, (PerReplica([np.ones(2, "float32"), np.ones(0, "float32")]),))


def test_15_a_merge_function_runs_once_and_may_run_steps(two: jaxdist.Strategy) -> None:
    calls: list[str] = []

    def merged(strategy: Any, x: Any) -> Any:
        calls.append("merged")
        return strategy.reduce("sum", x, axis=None)

    def step(x: Any) -> Any:
        return get_replica_context().merge_call(merged, (x,))

    assert float(two.run(step, (PerReplica([1.0, 3.0]),))) == 4
    with jaxdist.config.run_eagerly(True):
        assert float(two.run(step, (PerReplica([1.0, 3.0]),))) == 4
    assert calls == ["merged", "merged"]

    def doubled(strategy: Any, x: Any) -> Any:
        return strategy.run(lambda x: 2 * x, (x,))

    result = two.run(
        lambda x: get_replica_context().merge_call(doubled, (x,)), (PerReplica([1.0, 3.0]),)
    )
    assert [float(v) for v in two.unwrap(result)] == [2, 6]


def test_16_names_of_version_1_are_there(two: jaxdist.Strategy) -> None:
    grouped = two.group(PerReplica([1.0, 2.0]))
    assert grouped == two.unwrap(PerReplica([1.0, 2.0])) == (1.0, 2.0)
    assert two.make_dataset_iterator([np.zeros(2)]).initialize() == []


def test_the_page_lists_each_of_them_by_its_number() -> None:
    section = PAGE.split("## Differences on purpose\n")[1].split("\n## ")[0]
    numbers = [int(n) for n in re.findall(r"^(\d+)\. \*\*", section, flags=re.MULTILINE)]
    assert numbers == list(range(1, 17))
    here = pathlib.Path(__file__).read_text()
    tested = {int(n) for n in re.findall(r"^def test_(\d+)_", here, flags=re.MULTILINE)}
    assert tested == set(numbers)
