"""Values that are equal on all replicas stay one array, whatever else the step does with its rows.

JAX takes short cuts for arrays without rows, so the trace of a replica without rows lacks
operations that the others have.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica
from tests.tables import sampled

_COLUMNS = jnp.array([3, 0, 1, 1])
_WEIGHTS = jnp.arange(16.0).reshape(4, 4)

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "take": lambda x: jnp.take(x, _COLUMNS, axis=1),
    "index": lambda x: x[:, _COLUMNS],
    "two indexes": lambda x: (x[:, _COLUMNS], x[..., 1], x[:, ::2]),
    "mask of columns": lambda x: x[:, np.array([True, False, True, False])],
    "set": lambda x: x.at[:, :2].set(_WEIGHTS[0, :2]),
    "add": lambda x: x.at[:, 1].add(_WEIGHTS[0, 0]),
    "max": lambda x: x.at[:, _COLUMNS].max(1.0),
    "set and index": lambda x: (x.at[:, :2].set(jnp.ones(2)), x[:, _COLUMNS]),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "sort": lambda x: jnp.sort(x, -1)[:, 1:],
    "dot": lambda x: x @ _WEIGHTS,
    "einsum": lambda x: jnp.einsum("nc,dc,d->nd", x, _WEIGHTS, _WEIGHTS[0]),
    "dynamic slice": lambda x: jax.lax.dynamic_slice_in_dim(x, 1, 2, 1),
    "concatenate": lambda x: jnp.concatenate([x, jnp.ones((x.shape[0], 2))], -1),
    "zeros": lambda x: jnp.zeros((x.shape[0], 3)) + x[:, :1],
    "stack": lambda x: jnp.stack([x, x[:, _COLUMNS]], 1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 1))),
    "roll": lambda x: jnp.roll(x, 1, -1),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 4),
    "look-up": lambda x: _WEIGHTS[jnp.argmax(x, -1)],
    "where": lambda x: jnp.where(x > 0.5, x, _WEIGHTS[0]),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "vmap": lambda x: jax.vmap(lambda row: row[_COLUMNS] * row.sum())(x),
    "convolve": lambda x: jax.lax.conv(x[:, None], jnp.ones((1, 1, 2)), (1,), "SAME")[:, 0],
}
ROWS = ((2, 2, 1, 0), (1, 0, 0, 0), (2, 1, 1, 1))


@pytest.mark.parametrize(
    "case",
    sampled([*itertools.product(OPERATIONS, ROWS)], 5, name=lambda case: f"{case[0]}, {case[1]}"),
)
@pytest.mark.parametrize("is_first", [True, False], ids=["before the rows", "after the rows"])
@pytest.mark.parametrize("op_by_op", [False, True], ids=["compiled", "op by op"])
def test_equal_values_beside_an_operation_on_rows_are_one_array(
    case: tuple[str, tuple[int, ...]], is_first: bool, op_by_op: bool
) -> None:
    name, rows = case
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    data = [np.random.default_rng(i).normal(size=(n, 4)).astype("f") for i, n in enumerate(rows)]

    def step(x: Any) -> Any:
        def count() -> Any:
            n = jaxdist.get_replica_context().all_reduce("sum", x.shape[0])
            return n, _WEIGHTS[:, :1].sum() / n, jnp.zeros(2) + _WEIGHTS[1, 2:]

        equal = count() if is_first else None
        found = OPERATIONS[name](x)
        return equal or count(), found

    with jaxdist.config.run_eagerly(op_by_op):
        equal, found = strategy.run(step, args=(PerReplica(data),))
    total = sum(rows)
    wanted = (total, np.float32(24 / total), np.array([6.0, 7.0]))
    for value, own in zip(equal, wanted, strict=True):
        assert not isinstance(value, PerReplica)
        np.testing.assert_allclose(value, own)
    for leaf, *own in zip(
        jax.tree.leaves(found, is_leaf=lambda v: isinstance(v, PerReplica)),
        *(jax.tree.leaves(OPERATIONS[name](jnp.asarray(x))) for x in data),
        strict=True,
    ):
        for mine, theirs in zip(strategy.experimental_local_results(leaf), own, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
