"""Partitioners give the numbers of shards that TensorFlow's give."""

import json
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.errors import ArgumentError, ArgumentTypeError, InvalidArgumentError
from jaxdist.experimental import partitioners

# Answers of tensorflow-cpu 2.21: class, its arguments, shape, dtype, axis, shards of each dim.
ANSWERS = json.loads((pathlib.Path(__file__).parent / "partitioner_answers.json").read_text())
FIXED, LEAST, MOST = (
    partitioners.FixedShardsPartitioner,
    partitioners.MinSizePartitioner,
    partitioners.MaxSizePartitioner,
)


def test_the_shards_are_those_of_tensorflow() -> None:
    assert len(ANSWERS) > 300
    for kind, given, shape, dtype, axis, wanted in ANSWERS:
        found = getattr(partitioners, kind)(*given)(tuple(shape), dtype, axis)
        assert found == wanted, (kind, given, shape, dtype, axis)
        assert all(type(n) is int for n in found)


@pytest.mark.parametrize(
    ("made", "shape", "wanted"),
    [
        (FIXED(3), (10, 4), [3, 1]),
        (FIXED(3), (2, 4), [2, 1]),
        (LEAST(8, 10), (7, 1), [4, 1]),
        (LEAST(4, 10), (6, 1), [6, 1]),
        (LEAST(), (10, 4), [1, 1]),
        (LEAST(256 << 10, 16), (1024, 1024), [16, 1]),
        (LEAST(256 << 10, 8), (1024, 1024), [8, 1]),
        (MOST(4), (6, 1), [6, 1]),
        (MOST(10), (6, 1), [3, 1]),
        (MOST(1024), (6, 1), [1, 1]),
        (MOST(2), (6, 1), [6, 1]),
        (MOST(4, 2), (6, 1), [2, 1]),
        (MOST(24), (5, 3), [3, 1]),
    ],
)
def test_the_shards_are_those_of_the_documentation(
    made: partitioners.Partitioner, shape: tuple[int, ...], wanted: list[int]
) -> None:
    assert made(shape, np.float32) == wanted
    assert made(list(shape), jnp.float32, axis=0) == wanted


@pytest.mark.parametrize("made", [FIXED(3), LEAST(1, 3), MOST(1)])
def test_a_dim_without_rows_is_one_shard(made: partitioners.Partitioner) -> None:
    assert made((0, 4), "float32") == [1, 1]
    assert made((4, 0), "float32", axis=1) == [1, 1]


def test_texts_count_as_many_bytes_as_the_partitioner_says() -> None:
    for dtype in ("string", str, bytes, np.dtype("S8")):
        assert LEAST(16, 10, 3)((10, 3), dtype) == [6, 1]


@pytest.mark.parametrize(
    ("make", "error", "found"),
    [
        (lambda: FIXED(0), ArgumentError, "num_shards=0"),
        (lambda: FIXED(-1), ArgumentError, "num_shards=-1"),
        (lambda: FIXED(2.0), ArgumentTypeError, "num_shards=2.0"),  # type: ignore[arg-type]
        (lambda: LEAST(0), ArgumentError, "min_shard_bytes=0"),
        (lambda: LEAST(1, 0), ArgumentError, "max_shards=0"),
        (lambda: LEAST(1, 1, 0), ArgumentError, "bytes_per_string=0"),
        (lambda: MOST(0), ArgumentError, "max_shard_bytes=0"),
        (lambda: MOST(1, -1), ArgumentError, "max_shards=-1"),
        (lambda: MOST(1, 1, 0), ArgumentError, "bytes_per_string=0"),
        (lambda: FIXED(2)((), "float32"), ArgumentError, "scalar"),
        (lambda: FIXED(2)((3,), "float32", 1), ArgumentError, "axis=1"),
        (lambda: MOST(2)((3, 4), "float32", -3), ArgumentError, "axis=-3"),
        (lambda: LEAST(2)((3, -1), "float32"), ArgumentError, r"shape\[1\]=-1"),
        (lambda: LEAST(2)((3, None), "float32"), ArgumentTypeError, r"shape\[1\]=None"),  # type: ignore[arg-type]
        (lambda: LEAST(2)(None, "float32"), ArgumentTypeError, "shape=None"),  # type: ignore[arg-type]
        (lambda: FIXED(2)((3,), None), ArgumentTypeError, "dtype=None"),
        (lambda: FIXED(2)((3,), object), ArgumentTypeError, "dtype="),
        (lambda: FIXED(2)((3,), "float23"), ArgumentTypeError, "float23"),
    ],
)
def test_what_is_wrong_is_refused_by_name(make: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        make()


def test_the_values_that_tensorflow_refuses_are_value_errors_here_too() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    with pytest.raises(ValueError, match="min_shard_bytes"):
        LEAST(min_shard_bytes=0)


def test_the_base_class_has_no_rule() -> None:
    with pytest.raises(NotImplementedError, match=r"defines __call__\(shape, dtype, axis=0\)"):
        partitioners.Partitioner()((3,), "float32")


def test_the_module_can_be_imported_by_its_name() -> None:
    assert sys.modules["jaxdist.experimental.partitioners"] is partitioners
