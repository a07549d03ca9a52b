"""Rows of variables outside steps, and `IndexedSlices`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jaxdist
from jaxdist import IndexedSlices, Variable, VariableSynchronization
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError


def _table() -> Variable:
    with jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return Variable([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], name="table")


_MODELS: dict[str, Any] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
}


@pytest.mark.parametrize("call", list(_MODELS))
def test_rows_change_every_copy_once_and_repeated_ones_one_after_the_other(call: str) -> None:
    v, expected = _table(), np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    rows, numbers = np.array([[2.0, 4.0], [0.5, 8.0], [3.0, 1.0]]), np.array([2, 0, 2])

    result = getattr(v, call)(IndexedSlices(rows.astype(np.float32), numbers))

    _MODELS[call](expected, numbers, rows)
    for copy in (result, *v.values):
        np.testing.assert_allclose(copy, expected, rtol=1e-6)


def test_update_replaces_rows_and_takes_a_sparse_matrix_of_rows() -> None:
    v = _table()
    dense = np.zeros((3, 2), np.float32)
    dense[1] = [7.0, 8.0]

    sparse: Any = BCOO
    v.scatter_update(sparse.fromdense(dense, n_dense=1))

    assert v.numpy().tolist() == [[1.0, 1.0], [7.0, 8.0], [3.0, 3.0]]


@pytest.mark.parametrize(
    ("given", "kind", "what"),
    [
        (IndexedSlices([[1.0, 1.0]], [3]), ArgumentError, "row 3.*3 rows"),
        (IndexedSlices([[1.0, 1.0]], [-1]), ArgumentError, "row -1"),
        (IndexedSlices([[1.0]], [0]), ShapeError, r"float32\[1, 1\]"),
        (IndexedSlices([[1j, 1.0]], [0]), ArgumentTypeError, "complex64"),
        (np.ones((3, 2)), ArgumentTypeError, "ndarray"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_changes(
    given: Any, kind: type[Exception], what: str
) -> None:
    v = _table()

    with pytest.raises(kind, match=what) as caught:
        v.scatter_add(given)
    assert "'table'" in str(caught.value)
    assert v.numpy().tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_scalars_traced_rows_and_on_read_variables_have_no_rows_to_change() -> None:
    rows = IndexedSlices([1.0], [0])

    with pytest.raises(ArgumentError, match="scalar"):
        Variable(1.0).scatter_add(rows)
    with pytest.raises(ContextError, match="tracing"):
        jax.jit(lambda x: Variable([1.0]).scatter_add(IndexedSlices(x, jnp.array([0]))))(
            jnp.ones(1)
        )
    with jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        own = Variable([1.0], synchronization=VariableSynchronization.ON_READ)
    for call in (own.scatter_add, own.scatter_update):
        with pytest.raises(NotImplementedError, match="ON_READ"):
            call(rows)


@pytest.mark.parametrize(
    ("values", "indices", "kind"),
    [
        ([1.0], [0.5], ArgumentTypeError),
        ([1.0, 2.0], [0], ShapeError),
        (1.0, 0, ShapeError),
        ([[1.0]], [[0]], ShapeError),
    ],
)
def test_slices_that_do_not_fit_together_are_refused(
    values: Any, indices: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="IndexedSlices"):
        IndexedSlices(values, indices)


def test_slices_are_a_pytree_and_become_dense() -> None:
    slices = IndexedSlices([1.0, 2.0, 4.0], [2, 0, 2], dense_shape=(3,))

    doubled = jax.jit(lambda s: s.with_parts(s.values * 2, s.indices))(slices)

    assert isinstance(doubled, IndexedSlices)
    assert slices.to_dense().tolist() == [2.0, 0.0, 5.0]
    assert (doubled.values.tolist(), doubled.dense_shape) == ([2.0, 4.0, 8.0], (3,))
    assert doubled.indices.tolist() == [2, 0, 2]
    with pytest.raises(ArgumentError, match="dense_shape"):
        IndexedSlices([1.0], [0]).to_dense()
