"""A variable is cut along its rows, into shards of nearly equal sizes, the larger ones first."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._parameter_server.variables.make_shards import make_shards, split_rows
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.experimental.partitioners import FixedShardsPartitioner, MaxSizePartitioner

FOUR = FixedShardsPartitioner(4)
TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.mark.parametrize(
    ("rows", "count", "wanted"),
    [(10, 4, [3, 3, 2, 2]), (4, 4, [1] * 4), (7, 1, [7]), (5, 2, [3, 2]), (2, 3, [1, 1, 0])],
)
def test_the_sizes_differ_by_one_row_at_most(rows: int, count: int, wanted: list[int]) -> None:
    assert split_rows(rows, count) == wanted


def test_an_array_is_cut_into_its_rows() -> None:
    shards = make_shards(None, None, FOUR, TABLE)
    assert [s.shape for s in shards] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    assert [s.offset for s in shards] == [(0, 0), (3, 0), (6, 0), (8, 0)]
    np.testing.assert_array_equal(np.concatenate([s.make_value() for s in shards]), TABLE)
    assert len(make_shards(None, None, FOUR, TABLE[:2])) == 2


def test_a_list_of_numbers_is_an_initial_value() -> None:
    shards = make_shards(None, None, FixedShardsPartitioner(2), [1.0, 2.0, 3.0])
    assert [s.make_value().tolist() for s in shards] == [[1.0, 2.0], [3.0]]


def test_a_function_that_takes_the_place_of_a_shard_makes_each_alone() -> None:
    asked = []

    def make(partition_shape: Any, partition_offset: Any) -> Any:
        asked.append((partition_shape, partition_offset))
        start = partition_offset[0]
        return TABLE[start : start + partition_shape[0]]

    shards = make_shards((10, 2), "float32", FOUR, make)
    assert asked == []
    np.testing.assert_array_equal(np.concatenate([s.make_value() for s in shards]), TABLE)
    assert asked == [(s.shape, s.offset) for s in shards]


def test_a_function_with_shard_info_gets_it() -> None:
    def make(*, shard_info: Any) -> Any:
        start = shard_info.offset[0]
        return TABLE[start : start + shard_info.shape[0]]

    shards = make_shards((10, 2), "float32", FOUR, make)
    np.testing.assert_array_equal(np.concatenate([s.make_value() for s in shards]), TABLE)


def test_another_function_is_called_once_and_its_result_is_cut() -> None:
    for shape, dtype in (((10, 2), "float32"), (None, "float32"), ((10, 2), None)):
        calls = []

        def make(calls: list[int] = calls) -> Any:
            calls.append(1)
            return TABLE

        shards = make_shards(shape, dtype, FOUR, make)
        np.testing.assert_array_equal(np.concatenate([s.make_value() for s in shards]), TABLE)
        assert calls == [1]


def test_a_function_that_ignores_the_place_of_its_shard_is_cut_too() -> None:
    shards = make_shards((10, 2), "float32", FOUR, lambda **_: TABLE)
    np.testing.assert_array_equal(np.concatenate([s.make_value() for s in shards]), TABLE)


def test_one_shard_is_the_whole() -> None:
    for partitioner in (None, FixedShardsPartitioner(1), MaxSizePartitioner(1 << 20)):
        (shard,) = make_shards(None, None, partitioner, TABLE)
        assert (shard.shape, shard.offset) == ((10, 2), (0, 0))
        np.testing.assert_array_equal(shard.make_value(), TABLE)
    (scalar,) = make_shards((), "float32", FOUR, lambda: jnp.float32(3))
    assert (scalar.shape, scalar.offset, float(scalar.make_value())) == ((), (), 3.0)
    (number,) = make_shards(None, None, FOUR, 3.0)
    assert float(number.make_value()) == 3.0


def test_a_function_without_a_signature_is_called_without_arguments() -> None:
    class Strange:
        @property
        def __signature__(self) -> Any:
            raise ValueError

        def __call__(self) -> Any:
            return TABLE

    assert len(make_shards((10, 2), "float32", FOUR, Strange())) == 4


@pytest.mark.parametrize(
    ("given", "error", "found"),
    [
        (((10, 2), "float32", FOUR, None), ArgumentError, "no initial_value"),
        ((None, None, lambda **_: [2, 2], TABLE), ArgumentError, r"variable_partitioner.*\[2, 2\]"),
        ((None, None, lambda **_: [0, 1], TABLE), ArgumentError, "variable_partitioner"),
        ((None, None, lambda **_: [2], TABLE), ArgumentError, "variable_partitioner"),
        ((None, None, lambda **_: None, TABLE), ArgumentTypeError, "variable_partitioner"),
        ((None, None, lambda **_: [2.0, 1], TABLE), ArgumentTypeError, "variable_partitioner"),
        (((9, 2), None, FOUR, TABLE), ShapeError, r"\[10, 2\].*\[9, 2\]"),
    ],
)
def test_what_is_wrong_is_refused(given: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=f"(?s){found}"):
        make_shards(*given)


def test_a_function_that_makes_another_shape_is_refused() -> None:
    shards = make_shards((10, 2), "float32", FOUR, lambda: TABLE[:5])
    with pytest.raises(ShapeError, match=r"\[5, 2\]"):
        shards[0].make_value()
