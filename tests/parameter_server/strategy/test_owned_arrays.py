"""What a caller writes into its NumPy arrays afterwards changes no variable and no call."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxdist import IndexedSlices, Variable
from jaxdist.coordinator import ClusterCoordinator
from tests.parameter_server.strategy.making import make_strategy

# Large enough that a worker is not ready before the caller writes, and a multiple of what JAX
# uses without a copy.
SIZE = 2**17


def test_a_scheduled_call_has_the_values_of_its_moment() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    buffer = np.zeros(SIZE, np.float32)
    results = []
    for number in range(30):
        buffer[:] = number
        results.append(coordinator.schedule(lambda x: x.max(), (buffer,)))
    assert [float(result.fetch()) for result in results] == list(range(30))


CHANGES: dict[str, tuple[Callable[[Any, np.ndarray], Any], float]] = {
    "assign": (lambda v, x: v.assign(x), 1),
    "assign_add": (lambda v, x: v.assign_add(x), 3),
    "assign_sub": (lambda v, x: v.assign_sub(x), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_variable_keeps_what_it_was_given(name: str) -> None:
    change, expected = CHANGES[name]
    initial = np.full(SIZE, 2, np.float32)
    with make_strategy().scope():
        variable = Variable(initial, name="v")
    initial[:] = -1
    given = np.ones(SIZE, np.float32)
    change(variable, given)
    given[:] = -1
    np.testing.assert_array_equal(variable.numpy(), np.full(SIZE, expected, np.float32))


def test_rows_keep_what_they_were_given() -> None:
    with make_strategy().scope():
        table = Variable(np.zeros((64, 64), np.float32), name="table")
    rows, ids = np.ones((64, 64), np.float32), np.arange(64, dtype=np.int32)
    table.scatter_update(IndexedSlices(rows, ids))
    rows[:], ids[:] = -1, 0
    np.testing.assert_array_equal(table.numpy(), np.ones((64, 64), np.float32))


def test_a_model_keeps_what_it_was_given() -> None:
    with make_strategy().scope():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    given = np.ones((64, 64), np.float32)
    model.kernel[...] = given
    given[:] = -1
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), np.ones((64, 64), np.float32))


def test_a_dataset_may_fill_one_array_again_and_again() -> None:
    coordinator = ClusterCoordinator(make_strategy(workers=1))

    def dataset_fn() -> Iterator[np.ndarray]:
        buffer = np.zeros(SIZE, np.float32)
        for number in range(100):
            buffer[:] = number
            yield buffer

    def take_three(iterator: Any) -> Any:
        return [next(iterator).max() for _ in range(3)]

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    found = [coordinator.schedule(take_three, (iterator,)) for _ in range(5)]
    taken = sorted(int(x) for result in found for x in result.fetch())
    assert taken == list(range(15))
