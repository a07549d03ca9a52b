"""`ReplicaContext.all_gather`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Strategy
from jaxdist.errors import ArgumentError, ShapeError
from tests.strategies.oracle import is_plain, of_this_process, per_replica, refused

pytestmark = pytest.mark.both_executors


def _all_gather(value: Any, axis: Any, *args: Any, **kwargs: Any) -> Any:
    return jaxdist.get_replica_context().all_gather(value, axis, *args, **kwargs)


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def test_all_gather_is_numpys_concatenation_on_every_axis(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(4).normal(size=(count, 2, 3, 1)).astype(np.float32)
    axes = (0, 1, 2, -1, -3)
    got = strategy.run(
        lambda x: [_all_gather(x, axis) for axis in axes],
        (per_replica(strategy, lambda r: rows[r]),),
    )
    for value, axis in zip(got, axes, strict=True):
        assert is_plain(value)
        np.testing.assert_array_equal(value, np.concatenate(list(rows), axis=axis))


def test_structures_are_kept(two: Strategy) -> None:
    x = PerReplica([np.array([1]), np.array([2])])
    got = two.run(lambda x: _all_gather({"a": x, "b": [(x * 2,)], "c": None}, 0), (x,))
    assert got["a"].tolist() == [1, 2]
    assert got["b"][0][0].tolist() == [2, 4]
    assert got["c"] is None


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64", "key"],
)
def test_every_dtype_is_gathered_as_it_is(two: Strategy, dtype: str) -> None:
    if dtype == "key":
        keys = [jax.random.split(jax.random.key(r), 1) for r in range(2)]
        got = two.run(lambda k: jax.random.key_data(_all_gather(k, 0)), (PerReplica(keys),))
        want = np.concatenate([jax.random.key_data(k) for k in keys])
    else:
        rows = [jnp.asarray([[0, 1]], dtype), jnp.asarray([[1, 1]], dtype)]
        got = two.run(lambda x: _all_gather(x, 1), (PerReplica(rows),))
        assert str(got.dtype) == dtype
        want = np.concatenate([np.asarray(r) for r in rows], axis=1)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_empty_contributions_are_gathered(strategy: Strategy) -> None:
    got = strategy.run(lambda: _all_gather(jnp.ones((0, 2)), 0))
    assert got.shape == (0, 2)


def test_every_replica_has_the_whole(strategy: Strategy) -> None:
    def step() -> Any:
        replica = jaxdist.get_replica_context().replica_id_in_sync_group
        return _all_gather(replica[None], 0).sum() * 10 + replica

    count = strategy.num_replicas_in_sync
    got = strategy.experimental_local_results(strategy.run(step))
    every = [count * (count - 1) * 5 + r for r in range(count)]
    assert [int(v) for v in got] == of_this_process(strategy, every)


def test_options_and_their_older_name_change_nothing(two: Strategy) -> None:
    x = PerReplica([np.array([1]), np.array([2])])
    options = jaxdist.experimental.CommunicationOptions(bytes_per_pack=1)
    got = two.run(
        lambda x: (_all_gather(x, 0, options), _all_gather(x, 0, experimental_hints=options)),
        (x,),
    )
    assert [g.tolist() for g in got] == [[1, 2], [1, 2]]
    with refused(ArgumentError, "both options and experimental_hints"):
        two.run(lambda x: _all_gather(x, 0, "o", experimental_hints="h"), (x,))


def test_scalars_are_refused_with_the_remedy(two: Strategy) -> None:
    with refused(ShapeError, "ReplicaContext.all_gather", "value['x'][0]", "scalar", "value[None]"):
        two.run(lambda x: _all_gather({"x": [x]}, 0), (PerReplica([1.0, 2.0]),))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_outside_the_rank_is_refused_with_the_valid_ones(two: Strategy, axis: int) -> None:
    x = PerReplica([np.ones((1, 2), np.float32)] * 2)
    with refused(
        ShapeError, f"axis={axis}", "value['x']", "float32[1, 2] of rank 2", "[-2, -1, 0, 1]"
    ):
        two.run(lambda x: _all_gather({"x": x}, axis), (x,))


@pytest.mark.parametrize("axis", [None, "0", 0.5, True, (0,)], ids=repr)
def test_an_axis_that_is_no_integer_is_refused(two: Strategy, axis: Any) -> None:
    with refused(ShapeError, f"axis={axis!r}", "one integer"):
        two.run(lambda x: _all_gather(x, axis), (PerReplica([np.ones(1)] * 2),))


def test_shapes_that_differ_elsewhere_are_refused_and_later_gathers_work(two: Strategy) -> None:
    def step(x: Any) -> Any:
        return _all_gather(x, 0)

    assert two.run(step, (PerReplica([np.ones(2), np.zeros(1)]),)).tolist() == [1, 1, 0]
    with refused(ShapeError, "replicas [0]: float32[1, 2]", "replicas [1]: float32[1, 3]", "dim 0"):
        two.run(step, (PerReplica([np.ones((1, 2)), np.ones((1, 3))]),))
    assert two.run(step, (PerReplica([np.ones(1), np.zeros(1)]),)).tolist() == [1, 0]
