"""A model of Equinox has the gradients of one device, also with parameters in pieces."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import partition

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)


def _model() -> tuple[Any, Any, Any]:
    eqx: Any = importlib.import_module("equinox")
    model = eqx.nn.MLP(4, 8, width_size=16, depth=1, key=jax.random.key(0))
    return eqx, *eqx.partition(model, eqx.is_inexact_array)


def _grads_on_one_device() -> list[Any]:
    eqx, params, static = _model()

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(static, params))(X) ** 2)

    return jax.tree.leaves(jax.grad(loss_of)(params))


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_the_gradients_are_those_of_one_device(is_in_pieces: bool) -> None:
    eqx, params, static = _model()
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    if is_in_pieces:
        params = partition.place(strategy, params, partition.fsdp(min_bytes=0))

    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean(jax.vmap(eqx.combine(static, params))(x) ** 2)

        return jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss_of)(params))

    rows = jax.device_put(X, strategy.per_replica_sharding)
    found = jax.tree.leaves(strategy.run(step, (params, rows)))
    for one, other in zip(found, _grads_on_one_device(), strict=True):
        whole = getattr(one, "array", one)
        np.testing.assert_allclose(np.asarray(whole).reshape(other.shape), other, atol=1e-6)
