"""A mean over replicas of a function of gradients: under FSDP right, or refused by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import partition
from jaxdist.errors import ShardedArrayError

pytestmark = pytest.mark.both_executors

WEIGHTS = np.arange(1, 5, dtype=np.float32)
ROWS = np.arange(8, dtype=np.float32).reshape(8, 1) - 3

Function = Callable[[Any, Any], Any]

# Of a gradient `g` and its parameter `w`.
LINEAR: dict[str, Function] = {
    "itself": lambda g, w: g,
    "scaled": lambda g, w: 2 * g / 3,
    "weight decay": lambda g, w: g + 0.1 * w**2,
    "times the parameter": lambda g, w: -g * jnp.sin(w),
    "chosen by the parameter": lambda g, w: jnp.where(w > 2, g, 0.0),
    "a sum of two": lambda g, w: g + g * 3,
    "bfloat16": lambda g, w: g.astype(jnp.bfloat16).astype(jnp.float32),
    "the parameter": lambda g, w: w**2,
}
OTHERS: dict[str, Function] = {
    "square": lambda g, w: g**2,
    "product": lambda g, w: g * (g + w),
    "size": lambda g, w: jnp.abs(g),
    "sign": lambda g, w: jnp.sign(g),
    "clip": lambda g, w: jnp.clip(g, -1, 1),
    "chosen by itself": lambda g, w: jnp.where(g > 0, w, 0.0),
    "divisor": lambda g, w: w / (g + 20),
    "integer": lambda g, w: g.astype(jnp.int32),
    "in a jit": lambda g, w: jax.jit(jnp.square)(g) + w,
    "in a scan": lambda g, w: jax.lax.scan(lambda c, _: (c * g, None), w, length=2)[0],
    "later linear": lambda g, w: 2 * jnp.tanh(g) + w,
}


def _gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.sum(jnp.sin(x * 0.1) * w[None], axis=1)))(w)


def _run(function: Function, rules: partition.Rules, *, reduces_first: bool = False) -> Any:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    weights = partition.place(strategy, {"w": jnp.asarray(WEIGHTS)}, rules)

    def step(p: Any, x: Any) -> Any:
        replica = jaxdist.get_replica_context()
        grads = _gradient(p["w"], x)
        if reduces_first:
            grads = replica.all_reduce("mean", grads)
        made = jax.tree.map(function, grads, p["w"])
        return replica.all_reduce("mean", made)

    rows = jax.device_put(ROWS, strategy.per_replica_sharding)
    return np.asarray(strategy.run(step, (weights, rows)))


@pytest.mark.parametrize("name", LINEAR)
def test_the_mean_of_a_linear_function_is_that_of_replicated_parameters(name: str) -> None:
    found = _run(LINEAR[name], partition.fsdp(min_bytes=0))
    parts = [_gradient(WEIGHTS, rows) for rows in np.split(ROWS, 4)]
    expected = np.mean([LINEAR[name](g, WEIGHTS) for g in parts], axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-2 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_the_mean_of_another_function_is_refused_with_both_ways_to_write_it(name: str) -> None:
    with pytest.raises(ShardedArrayError, match=r"test_reduced_gradients.py:\d+") as error:
        _run(OTHERS[name], partition.fsdp(min_bytes=0))
    assert "all-reduce the gradients first" in str(error.value)
    assert "jaxdist.partition.gather(params)" in str(error.value)


@pytest.mark.parametrize("name", OTHERS)
def test_after_an_all_reduce_every_function_is_that_of_the_mean(name: str) -> None:
    found = _run(OTHERS[name], partition.fsdp(min_bytes=0), reduces_first=True)
    gradient = np.asarray(_gradient(WEIGHTS, ROWS))
    expected = np.asarray(OTHERS[name](jnp.asarray(gradient), jnp.asarray(WEIGHTS)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_replicated_parameters_have_the_mean_of_the_function(name: str) -> None:
    found = _run(OTHERS[name], partition.replicated())
    parts = [jnp.asarray(_gradient(WEIGHTS, rows)) for rows in np.split(ROWS, 4)]
    made = [np.asarray(OTHERS[name](g, jnp.asarray(WEIGHTS))) for g in parts]
    np.testing.assert_allclose(found, np.mean(made, axis=0), rtol=1e-5)
