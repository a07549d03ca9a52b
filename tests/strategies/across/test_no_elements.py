"""Arrays without elements: XLA does not split them, and reductions still have NumPy's shapes."""

from typing import Any

import numpy as np
import pytest

from jaxdist import PerReplica, Strategy

SHAPES = [(2, 0), (0, 2), (0,), (0, 3, 2), (1, 0, 2)]
ROWS = [(shape, axis) for shape in SHAPES for axis in (None, *range(-len(shape), len(shape)))]


def _unchanged(x: Any) -> Any:
    return x


def _results(strategy: Strategy, values: list[np.ndarray]) -> list[Any]:
    """The values as they are given, and as results of a step."""
    return [PerReplica(values), strategy.run(_unchanged, (PerReplica(values),))]


@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_a_reduction_has_the_shape_and_the_numbers_of_numpy(
    strategy: Strategy, shape: tuple[int, ...], axis: int | None
) -> None:
    values = [np.zeros(shape, "float32")] * strategy.num_replicas_in_sync
    over = 0 if axis is None else (0, axis % len(shape) + 1)
    with np.errstate(invalid="ignore"):
        total = np.stack(values).sum(over)
        # A mean over no elements is nan.
        mean = total / np.prod([np.stack(values).shape[d] for d in np.atleast_1d(over)])
    for value in _results(strategy, values):
        np.testing.assert_array_equal(strategy.reduce("sum", value, axis=axis), total)
        np.testing.assert_array_equal(strategy.reduce("mean", value, axis=axis), mean)


@pytest.mark.parametrize(("shape", "axis"), [row for row in ROWS if row[1] is not None], ids=str)
def test_a_gather_has_the_shape_of_numpy(
    strategy: Strategy, shape: tuple[int, ...], axis: int
) -> None:
    values = [np.zeros(shape, "float32")] * strategy.num_replicas_in_sync
    for value in _results(strategy, values):
        assert strategy.gather(value, axis).shape == np.concatenate(values, axis).shape
