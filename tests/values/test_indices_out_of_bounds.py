"""Traced indices that name no row: they read nan and change nothing, negative ones included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import IndexedSlices, Variable
from jaxdist.nn import embedding_lookup

ROWS = 5
BEFORE = np.arange(1.0, 1 + 2 * ROWS, dtype="float32").reshape(ROWS, 2)
ids = st.lists(st.integers(-2 * ROWS, 2 * ROWS), min_size=1, max_size=4)


def _run(step: Any, found: list[int]) -> Any:
    """Run a step whose indices are traced."""
    return jaxdist.OneDeviceStrategy("cpu:0").run(step, (jnp.asarray(found, "int32"),))


def _read(found: list[int]) -> np.ndarray:
    missing = np.full(2, np.nan, "float32")
    return np.stack([BEFORE[i] if 0 <= i < ROWS else missing for i in found])


@settings(max_examples=15, deadline=None)
@given(ids)
def test_a_row_that_does_not_exist_is_read_as_nan(found: list[int]) -> None:
    with jaxdist.OneDeviceStrategy("cpu:0").scope():
        table = Variable(BEFORE)
    expected = _read(found)
    np.testing.assert_array_equal(_run(table.sparse_read, found), expected)
    np.testing.assert_array_equal(_run(lambda i: embedding_lookup(table, i), found), expected)
    np.testing.assert_array_equal(_run(lambda i: table.gather_nd(i[:, None]), found), expected)
    array = jnp.asarray(BEFORE)
    np.testing.assert_array_equal(_run(lambda i: embedding_lookup(array, i), found), expected)


CHANGES: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda old, new: new,
}


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=8, deadline=None)
@given(found=ids)
def test_a_row_that_does_not_exist_is_not_changed(name: str, found: list[int]) -> None:
    values = np.full((len(found), 2), 3.0, "float32")
    expected = BEFORE.copy()
    for i in found:
        if 0 <= i < ROWS:
            expected[i] = CHANGES[name](expected[i], values[0])
    with jaxdist.OneDeviceStrategy("cpu:0").scope():
        table = Variable(BEFORE)
    _run(lambda i: getattr(table, name)(IndexedSlices(values, i)), found)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)
    if name in ("scatter_add", "scatter_update"):
        table.assign(BEFORE)
        method = getattr(table, name.replace("scatter_", "scatter_nd_"))
        _run(lambda i: method(i[:, None], values), found)
        np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(ids)
def test_slices_leave_rows_out_that_the_whole_array_does_not_have(found: list[int]) -> None:
    values = np.ones((len(found), 2), "float32")
    expected = np.zeros((ROWS, 2), "float32")
    for i in found:
        if 0 <= i < ROWS:
            expected[i] += 1
    traced = _run(lambda i: IndexedSlices(values, i, dense_shape=(ROWS, 2)).to_dense(), found)
    np.testing.assert_array_equal(traced, expected)
    eager = IndexedSlices(values, np.asarray(found), dense_shape=(ROWS, 2)).to_dense()
    np.testing.assert_array_equal(eager, expected)


@pytest.mark.parametrize("row", [-3 * ROWS, ROWS, 3 * ROWS])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2), (ROWS, 2, 3)])
def test_an_assignment_to_a_slice_that_does_not_exist_changes_nothing(
    shape: tuple[int, ...], row: int
) -> None:
    before = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with jaxdist.OneDeviceStrategy("cpu:0").scope():
        table = Variable(before)
    _run(lambda i: table[i[0]].assign(np.full(shape[1:], 7.0, "float32")), [row])
    np.testing.assert_array_equal(table.numpy(), before)
    _run(lambda i: table[i[0]].assign(np.full(shape[1:], 7.0, "float32")), [ROWS - 1])
    np.testing.assert_array_equal(table.numpy()[-1], np.full(shape[1:], 7.0))
    np.testing.assert_array_equal(table.numpy()[:-1], before[:-1])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_negative_id_has_no_row_and_no_gradient(dtype: str) -> None:
    table, found = jnp.asarray(BEFORE), jnp.asarray([-1, 1, -ROWS], dtype)

    def loss(table: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.nan_to_num(embedding_lookup(table, found)).sum()

    grad = jaxdist.OneDeviceStrategy("cpu:0").run(jax.grad(loss), (table, found))
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(grad)[:, 0]), [1])
