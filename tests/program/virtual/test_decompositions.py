"""Decompositions of matrices, of whose results a step reads only some.

A custom call with results that nobody reads ended the process on several devices: XLA's older
partitioner marked only the others as values of one device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist import PerReplica, get_replica_context
from tests.program.virtual.test_deterministic import bits, on_all

# Functions of a symmetric matrix, which all give a vector.
ROWS: dict[str, Callable[[Any], Any]] = {
    "lu": lambda a: jnp.diag(lax.linalg.lu(a)[0]),
    "pivots": lambda a: lax.linalg.lu(a)[2].astype(jnp.float32),
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "eigenvectors": lambda a: jnp.abs(jnp.linalg.eigh(a)[1]).sum(0),
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "left": lambda a: jnp.abs(jnp.linalg.svd(a)[0]).sum(0),
    "qr": lambda a: jnp.abs(jnp.diag(jnp.linalg.qr(a)[1])),
    "eig": lambda a: jnp.abs(jnp.linalg.eig(a)[0]),
    "schur": lambda a: jnp.abs(jax.scipy.linalg.schur(a)[0]).sum(0),
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1][None],
    "slope of slogdet": lambda a: jax.grad(lambda x: jnp.linalg.slogdet(x)[1])(a)[0],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_decomposition_is_computed_beside_another_of_the_same_matrix(name: str) -> None:
    of = ROWS[name]
    own = np.random.default_rng(3).normal(size=(8, 4, 3)).astype("float32")

    def step(x: Any) -> Any:
        replica = get_replica_context()
        mean = replica.all_reduce("mean", x @ x.T) + 4 * jnp.eye(4)
        # The first is equal on all replicas, the second is not.
        first = of(mean)
        second = lax.linalg.lu(mean)[2] * replica.replica_id_in_sync_group
        return first, second, of(x @ x.T + 4 * jnp.eye(4))

    first, second, local = on_all(lambda strategy: strategy.run(step, (PerReplica([*own]),)))
    products = own @ own.transpose(0, 2, 1)
    of_mean = products.mean(0) + 4 * np.eye(4, dtype="float32")
    np.testing.assert_allclose(first, jax.jit(of)(of_mean), rtol=1e-3, atol=1e-4)
    permutation = np.asarray(lax.linalg.lu(of_mean)[2])
    for replica, (number, found) in enumerate(zip(second.values, local.values, strict=True)):
        np.testing.assert_array_equal(number, replica * permutation)
        expected = jax.jit(of)(products[replica] + 4 * np.eye(4, dtype="float32"))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_the_slope_of_a_determinant_of_a_mean_has_the_same_bits() -> None:
    own = np.random.default_rng(4).normal(size=(8, 4, 3)).astype("float32")

    def step(x: Any) -> Any:
        replica = get_replica_context()

        def volume(v: Any) -> Any:
            mean = replica.all_reduce("mean", v @ v.T) + jnp.eye(4)
            return jnp.linalg.slogdet(mean)[1] * replica.replica_id_in_sync_group

        return jax.grad(volume)(x)

    slopes = on_all(lambda strategy: strategy.run(step, (PerReplica([*own]),)))
    mean = np.einsum("rij,rkj->ik", own, own) / 8 + np.eye(4)
    # Every replica adds its number times the slope of the mean.
    expected = 2 * (28 / 8) * np.einsum("ik,rkj->rij", np.linalg.inv(mean), own)
    np.testing.assert_allclose(np.stack(slopes.values), expected, rtol=1e-3, atol=1e-4)
    assert bits(slopes)
