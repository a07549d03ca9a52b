"""Batches that are taken out of arrays are those of Keras, and nobody else has their memory."""

import importlib
from typing import Any

import keras
import numpy as np
import pytest

from jaxdist._keras.place import count_rows, read_batches
from jaxdist.errors import JaxdistError, ShapeError, UnsupportedError
from tests.strategies.oracle import refused

_X, _Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
adapters: Any = importlib.import_module("keras.src.trainers.data_adapters.array_data_adapter")


def _make_adapter(x: Any, y: Any, shuffle: Any) -> Any:
    keras.utils.set_random_seed(3)
    return adapters.ArrayDataAdapter(x, y, batch_size=4, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
def test_batches_are_those_of_keras(shuffle: Any, dtype: str) -> None:
    x = {"a": np.arange(66).reshape(11, 3, 2).astype(dtype), "b": np.arange(22).reshape(11, 2)}
    y = np.arange(11)
    wanted = list(_make_adapter(x, y, shuffle).get_jax_iterator())
    keras.utils.set_random_seed(3)
    found = list(read_batches(_make_adapter(x, y, shuffle)))
    assert len(found) == len(wanted) == 3
    for own, batch in zip(found, wanted, strict=True):
        for a, b in (
            (own[0]["a"], batch[0]["a"]),
            (own[0]["b"], batch[0]["b"]),
            (own[1], batch[1]),
        ):
            assert (a.dtype, type(a)) == (b.dtype, type(b))
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("is_view", [False, True], ids=["array", "view"])
def test_rows_in_another_order_are_read_only_and_their_source_is_not(is_view: bool) -> None:
    x = np.arange(44, dtype="float32").reshape(11, 4)
    given = x[:, ::2] if is_view else x
    for batch in read_batches(_make_adapter(given, np.arange(11), True)):
        for rows in batch:
            assert not rows.flags.writeable
            assert rows.base is None
            assert not np.shares_memory(rows, x)
    x[:] = 0


def test_rows_in_order_are_views_of_the_source_that_stay_writable() -> None:
    x = np.arange(44, dtype="float32").reshape(11, 4)
    for rows, _ in read_batches(_make_adapter(x, np.arange(11), False)):
        assert np.shares_memory(rows, x)
        assert rows.flags.writeable


def test_a_subclass_of_the_adapter_reads_in_its_own_way() -> None:
    class Adapter(adapters.ArrayDataAdapter):  # type: ignore[misc]
        def get_jax_iterator(self) -> Any:
            return iter([("own",)])

    assert list(read_batches(Adapter(np.arange(4), np.arange(4)))) == [("own",)]


@pytest.mark.parametrize(
    ("batch", "kind", "part"),
    [
        ((_X, _Y[:3]), ShapeError, "data[1]': 3"),
        ((_X, np.float32(1)), ShapeError, "data[1], a scalar"),
        ((_X, "text"), UnsupportedError, "data[1] of type str"),
    ],
)
def test_a_batch_that_has_no_rows_to_split_is_refused(
    batch: Any, kind: type[JaxdistError], part: str
) -> None:
    with refused(kind, part):
        count_rows(batch)
