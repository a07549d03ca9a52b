"""One function and one shape, given as every kind of value, in every order."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Strategy
from tests.strategies.oracle import assert_each, each

pytestmark = pytest.mark.both_executors

COUNT = 2
ROWS = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def _strategy() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _rows_step(x: Any) -> Any:
    context = jaxdist.get_replica_context()
    replica = context.replica_id_in_sync_group
    return x.sum() * 10 + replica, context.all_reduce("sum", x.sum()), str(x.shape)


# Each makes a float32 array whose global shape is [4]; what step then sees is its kind's.
ROWS_KINDS: dict[str, tuple[Callable[[Strategy], Any], bool]] = {
    "replicated": (lambda s: jax.device_put(ROWS, s.replicated_sharding), False),
    "per_replica": (lambda s: jax.device_put(ROWS, s.per_replica_sharding), True),
    "numpy": (lambda s: ROWS, False),
    "on_one_device": (lambda s: jax.device_put(ROWS, jax.local_devices()[-1]), False),
    "uncommitted": (lambda s: jnp.asarray(ROWS), False),
    "wrapped": (lambda s: PerReplica(np.split(ROWS, COUNT)), True),
    "wrapped_on_devices": (
        lambda s: PerReplica.of_global(jax.device_put(ROWS, s.per_replica_sharding)),
        True,
    ),
}


def _check_rows(strategy: Strategy, step: Any, kind: str) -> None:
    make, is_split = ROWS_KINDS[kind]
    own, total, shape = strategy.run(step, (make(strategy),))
    sums = [3.0, 7.0] if is_split else [10.0, 10.0]
    assert [float(v) for v in each(strategy, own)] == [s * 10 + r for r, s in enumerate(sums)]
    assert not isinstance(total, PerReplica)
    assert float(total) == sum(sums)
    assert shape == ("(2,)" if is_split else "(4,)")


@pytest.mark.compiled
@pytest.mark.parametrize("first", list(ROWS_KINDS))
def test_arrays_of_one_shape_mean_what_their_kind_says_in_every_order(first: str) -> None:
    """All orders of three kinds after `first`, with programs kept from order to order."""
    strategy = _strategy()
    for order in itertools.permutations([k for k in ROWS_KINDS if k != first], 3):
        for kind in (first, *order, first):
            _check_rows(strategy, _rows_step, kind)


@pytest.mark.parametrize("order", list(itertools.permutations(list(ROWS_KINDS)[:4])), ids="-".join)
def test_a_new_function_learns_the_kinds_in_every_order(order: tuple[str, ...]) -> None:
    strategy = _strategy()
    for kind in (*order, *order):
        _check_rows(strategy, _rows_step, kind)


def _scalar_step(x: Any) -> Any:
    replica = jaxdist.get_replica_context().replica_id_in_sync_group
    return (x + jnp.ones((), jnp.float16)) * (1 + replica.astype(jnp.float16)), str(x.dtype)


# A Python number is weakly typed, so that float16 stays float16; the others are float32.
SCALARS: dict[str, tuple[Callable[[Strategy], Any], list[float], str, str]] = {
    "python_float": (lambda s: 3.0, [4.0, 8.0], "float32", "float16"),
    "python_int": (lambda s: 3, [4.0, 8.0], "int32", "float16"),
    "numpy": (lambda s: np.float32(3), [4.0, 8.0], "float32", "float32"),
    "replicated": (
        lambda s: jax.device_put(np.float32(3), s.replicated_sharding),
        [4.0, 8.0],
        "float32",
        "float32",
    ),
    "on_one_device": (
        lambda s: jax.device_put(np.float32(3), jax.local_devices()[-1]),
        [4.0, 8.0],
        "float32",
        "float32",
    ),
    "per_replica": (lambda s: PerReplica([3.0, 5.0]), [4.0, 12.0], "float32", ""),
}


def _check_scalar(strategy: Strategy, kind: str) -> None:
    make, want, seen, result = SCALARS[kind]
    got, dtype = strategy.run(_scalar_step, (make(strategy),))
    assert isinstance(got, PerReplica)
    assert [float(v) for v in got.values] == want
    assert dtype == seen
    assert not result or str(got.values[0].dtype) == result


@pytest.mark.compiled
@pytest.mark.parametrize("first", list(SCALARS))
def test_scalars_mean_what_their_kind_says_in_every_order(first: str) -> None:
    strategy = _strategy()
    for order in itertools.permutations([k for k in SCALARS if k != first], 3):
        for kind in (first, *order, first):
            _check_scalar(strategy, kind)


def test_every_kind_of_scalar_means_its_own_after_every_other() -> None:
    strategy = _strategy()
    for first, second in itertools.permutations(SCALARS, 2):
        for kind in (first, second, first):
            _check_scalar(strategy, kind)


@pytest.mark.parametrize("order", list(itertools.permutations(list(SCALARS)[:4])), ids="-".join)
def test_a_new_function_learns_the_kinds_of_scalars_in_every_order(order: tuple[str, ...]) -> None:
    strategy = _strategy()
    for kind in (*order, *order):
        _check_scalar(strategy, kind)


def _pair_step(x: Any, y: Any) -> Any:
    return x.sum(), y.sum()


def test_two_arguments_of_one_shape_keep_their_own_kinds() -> None:
    strategy = _strategy()
    kinds = list(ROWS_KINDS)[:4]
    for first, second in [*itertools.product(kinds, kinds)] * 2:
        got = strategy.run(
            _pair_step, (ROWS_KINDS[first][0](strategy), ROWS_KINDS[second][0](strategy))
        )
        for value, kind in zip(got, (first, second), strict=True):
            want = [3.0, 7.0] if ROWS_KINDS[kind][1] else [10.0, 10.0]
            assert [float(v) for v in each(strategy, value)] == want
            assert isinstance(value, PerReplica) is ROWS_KINDS[kind][1]


def test_kinds_keep_their_meaning_on_every_strategy(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.arange(2.0 * count, dtype=np.float32)
    split = jax.device_put(rows, strategy.per_replica_sharding)
    whole = jax.device_put(rows, strategy.replicated_sharding)
    on_one = jax.device_put(rows, jax.local_devices()[-1])
    parts = [float(p.sum()) for p in np.split(rows, count)]
    alike = [float(rows.sum())] * count

    def step(x: Any) -> Any:
        return x.sum()

    for _ in range(2):
        for given, want in ((split, parts), (whole, alike), (rows, alike), (on_one, alike)):
            assert_each(strategy, strategy.run(step, (given,)), want)
    wrapped = PerReplica.of_global(split)
    assert_each(strategy, strategy.run(step, (wrapped,)), parts)
