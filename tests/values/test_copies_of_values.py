"""Copies of a `PerReplica`, also those that pass through a file, have the same values."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist import MirroredStrategy, PerReplica, Strategy

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "pickle of a tree": lambda v: pickle.loads(pickle.dumps({"a": [v]}))["a"][0],
    "flatten": lambda v: jax.tree.unflatten(jax.tree.structure(v), jax.tree.leaves(v)),
}


def _distinct(strategy: Strategy, shape: tuple[int, ...]) -> list[np.ndarray]:
    count = strategy.num_replicas_in_sync
    size = int(np.prod(shape))
    return [np.arange(size, dtype="float32").reshape(shape) + 10 * r for r in range(count)]


def _add(x: Any, number: int) -> Any:
    return x + number


@pytest.mark.parametrize("shape", [(), (2,), (1, 3), (2, 0), (0,), (0, 2)], ids=str)
def test_a_copy_has_one_value_for_each_replica(strategy: Strategy, shape: tuple[int, ...]) -> None:
    given = _distinct(strategy, shape)
    values = [PerReplica(given)]
    # With one replica the result is a plain array.
    if len(given) > 1:
        values.append(strategy.run(_add, (values[0], 0)))
    for value, way in itertools.product(values, WAYS):
        copied = WAYS[way](value)
        assert isinstance(copied, PerReplica)
        found = strategy.experimental_local_results(copied)
        assert [x.shape for x in found] == [shape] * len(given)
        np.testing.assert_array_equal(np.stack(found), np.stack(given))
        again = strategy.run(_add, (copied, 1))
        np.testing.assert_array_equal(
            np.stack(strategy.experimental_local_results(again)), np.stack(given) + 1
        )
        total = strategy.reduce("sum", copied, axis=None)
        np.testing.assert_array_equal(total, np.sum(given, axis=0))


def test_a_pickled_value_of_numpy_keeps_its_form() -> None:
    whole = PerReplica.of_global(np.arange(4.0), replicas_per_shard=2)
    copied = pickle.loads(pickle.dumps(whole))
    assert copied.form is whole.form
    np.testing.assert_array_equal(copied.array, whole.array)
    assert jax.tree.structure(copied) == jax.tree.structure(whole)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "flatten"])
def test_a_copy_of_random_keys_without_elements_has_their_shapes(way: str) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    none = jax.random.split(jax.random.key(0), (2, 1))[:, :0]
    result = strategy.run(lambda x: x, (PerReplica([none, none]),))
    copied = WAYS[way](result)
    assert repr(copied)
    assert [x.shape for x in copied.values] == [(2, 0), (2, 0)]
    assert {x.dtype for x in copied.values} == {none.dtype}
    assert strategy.gather(copied, 0).shape == (4, 0)
