"""Processes of one machine that are one JAX job, over loopback."""

import jax

from jaxdist import _mesh


def joined(rank: int, ports: list[int]) -> _mesh.ReplicaMesh:
    """Join, unless this process has; the mesh of the devices of all."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{ports[0]}", num_processes=len(ports), process_id=rank
        )
    return _mesh.build(jax.devices())
