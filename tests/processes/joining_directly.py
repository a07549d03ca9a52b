"""Joining a job by `jax.distributed` alone, for tests of the harness itself."""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def join_directly() -> int:
    """Join the job that TF_CONFIG describes, and return the number of this process."""
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, index = config["cluster"]["worker"], config["task"]["index"]
    service = os.environ.get("JAXDIST_SERVICE")
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        service or addresses[0],
        len(addresses),
        index,
        coordinator_bind_address="127.0.0.1:0" if service else addresses[0],
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
    return int(index)


def leave() -> None:
    """Leave the job together with the others."""
    from jax._src import distributed  # noqa: TID251

    client: Any = distributed.global_state.client
    client.wait_at_barrier("leave", 20_000)
    jax.distributed.shutdown()


def add_over_processes() -> dict[str, Any]:
    """Add one number of each device over all processes."""
    index = join_directly()
    mesh = Mesh(np.asarray(jax.devices()), "all")
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    local = np.arange(jax.local_device_count()) + 10.0 * index
    array = jax.make_array_from_process_local_data(sharding, local)
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))
    leave()
    return {"total": total, "local": jax.local_device_count(), "all": jax.device_count()}
