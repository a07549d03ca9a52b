"""A job for tests of the harness: the processes add up over all their devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdist


def add_over_processes() -> dict[str, Any]:
    """Add one number of each device over all processes."""
    jaxdist.MultiWorkerMirroredStrategy()  # joins the job
    mesh = Mesh(np.asarray(jax.devices()), "all")
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    local = np.arange(jax.local_device_count()) + 10.0 * jax.process_index()
    array = jax.make_array_from_process_local_data(sharding, local)
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))
    return {"total": total, "local": jax.local_device_count(), "all": jax.device_count()}
