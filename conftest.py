"""Eight CPU devices for every test and doctest, asked for before anything touches JAX.

Rank promotion is an error: a missing dim hides most easily where arrays are split over replicas.
(Dtype promotion cannot be one as well, since Flax relies on it.)
"""

import os
import types

# Tests of accelerators are run with JAX_PLATFORMS set from outside.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def _names_for_doctests(doctest_namespace: dict[str, object]) -> None:
    """What every Example may use without importing it: the libraries and the public names."""
    import jaxdist

    public = {
        name: value
        for name, value in vars(jaxdist).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    libraries = {"np": np, "jax": jax, "jnp": jnp, "optax": optax, "nnx": nnx, "jaxdist": jaxdist}
    rooms = {"partition": jaxdist.partition}
    doctest_namespace.update({**public, **libraries, **rooms})
