"""JAX's coordination service, hosted by a process that is no process of the job.

`jax.distributed.initialize` starts the service in process 0 only, so that the job ends with
process 0. Remove this file when JAX can start the service alone.
"""

from typing import Protocol

from jax._src.lib import _jax


class Service(Protocol):
    """A running coordination service. It ends when the object is deleted."""

    def shutdown(self) -> None:
        """End the service."""


def host_coordination_service(
    address: str, count: int, heartbeat_seconds: int, shutdown_seconds: int
) -> Service:
    """Start a coordination service that survives the death of any process of the job.

    Cost:
        Some threads of gRPC in this process. JAX's backend is not started.

    Args:
        address: Where the service listens, as `host:port`.
        count: Number of processes of the job.
        heartbeat_seconds: After how long without news a process counts as dead.
        shutdown_seconds: How long the processes wait for each other when they leave.

    Raises:
        RuntimeError: The service cannot listen at the address.
    """
    service: Service = _jax.get_distributed_runtime_service(
        address,
        count,
        heartbeat_timeout=heartbeat_seconds,
        shutdown_timeout=shutdown_seconds,
        recoverable=True,
    )
    return service
