"""A job for tests of the harness: the processes add up over all their devices."""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist._called import called
from jaxdist._processes import join


@called("add_over_processes")
def add_over_processes() -> dict[str, Any]:
    """Add one number of each device over all processes."""
    config = json.loads(os.environ["TF_CONFIG"])
    process = join(config["cluster"]["worker"], config["task"]["index"])
    mesh = Mesh(np.asarray(jax.devices()), "all")
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    local = np.arange(jax.local_device_count()) + 10.0 * process.index
    array = jax.make_array_from_process_local_data(sharding, local)
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))
    return {"total": total, "local": jax.local_device_count(), "all": jax.device_count()}
