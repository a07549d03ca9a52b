"""A setting of JAX that changes between two calls of `schedule` holds for the second one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator


def _divide(*given: Any) -> jax.Array:
    return sum(given, start=jnp.arange(3.0) / 3)


def _draw(*given: Any) -> jax.Array:
    return jax.random.uniform(jax.random.key(0), (4,)) + sum(given)


SETTINGS: dict[str, tuple[Callable[..., jax.Array], Callable[[], Any]]] = {
    "x64": (_divide, lambda: jax.enable_x64(True)),
    "partitionable": (
        _draw,
        lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("args", [(), (np.float32(1),)], ids=["no arguments", "an argument"])
def test_a_scheduled_function_is_traced_under_the_setting_of_its_call(
    setting: str, args: tuple[Any, ...]
) -> None:
    fn, change = SETTINGS[setting]
    cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    resolver = SimpleClusterResolver(cluster, rpc_layer="local")
    coordinator = ClusterCoordinator(jaxdist.ParameterServerStrategy(resolver))

    def check() -> np.ndarray:
        found, wanted = np.asarray(coordinator.schedule(fn, args).fetch()), np.asarray(fn(*args))
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
        return wanted

    before = check()
    with change():
        inside = check()
    assert inside.tobytes() != before.tobytes()
    check()
