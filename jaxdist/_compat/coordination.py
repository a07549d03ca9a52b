"""JAX's coordination service, and whether its backends have started.

`jax.distributed` offers neither the key-value store nor a service outside of process 0.
"""

from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from jaxdist._first_import import hide_lines

# XLA publishes the address of each process here, in gloo's own binary form.
_GLOO_PREFIX = "cpu:gloo"


def get_coordination_client() -> Any:
    """Return the client of the coordination service, or None before `jax.distributed.initialize`.

    Its key-value store is private in all versions.
    """
    return distributed.global_state.client


def get_process_numbers() -> tuple[int, int] | None:
    """Return the number of this process and of all, or None before `jax.distributed.initialize`.

    `jax.process_index` starts the backend.
    """
    state = distributed.global_state
    return None if state.client is None else (state.process_id, state.num_processes)


def hosts_coordination_service() -> bool:
    """Whether this process hosts the coordination service of its job."""
    return distributed.global_state.service is not None


def get_service_port() -> int | None:
    """Return the port of the service that this process' client uses, or None without one."""
    address = distributed.global_state.coordinator_address
    return None if address is None else int(address.rpartition(":")[2])


def have_backends_started() -> bool:
    """Whether JAX has looked at its devices, after which the processes cannot join any more."""
    return bool(xla_bridge.backends_are_initialized())


def host_coordination_service(
    address: str, count: int, heartbeat_seconds: int, shutdown_seconds: int
) -> Any:
    """Start a coordination service that survives the death of any process of the job.

    The service ends with `shutdown()`, or when the returned object is deleted.

    Cost:
        Some threads of gRPC in this process. JAX's backend is not started.

    Args:
        address: Where the service listens, as `host:port`.
        count: Number of processes of the job.
        heartbeat_seconds: Seconds without news after which a process counts as dead.
        shutdown_seconds: Seconds that processes wait for each other when they leave.

    Raises:
        RuntimeError: The service cannot listen at the address.
    """
    # The C++ code warns of `recoverable` at each start, and users can do nothing about it.
    with hide_lines([b"recoverable task feature"]):
        return _jax.get_distributed_runtime_service(
            address,
            count,
            heartbeat_timeout=heartbeat_seconds,
            shutdown_timeout=shutdown_seconds,
            recoverable=True,
        )


def set_gloo_address(address: str) -> None:
    """Let the CPU backend that starts next connect at an address of this machine.

    `jax.distributed.initialize` has no argument for it: JAX takes the address of the host's name.
    Collectives other than gloo, which the user may have chosen, stay as they are.
    """

    def make_client() -> Any:
        collectives = None
        if uses_gloo():
            collectives = _jax.make_gloo_tcp_collectives(
                distributed_client=distributed.global_state.client, hostname=address
            )
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def uses_gloo() -> bool:
    """Whether collectives between CPU processes go through gloo.

    `jax.config` does not list the option as an attribute.
    """
    client = distributed.global_state.client
    return client is not None and jax.config.values["jax_cpu_collectives_implementation"] == "gloo"


def get_gloo_addresses() -> list[bytes]:
    """Return what gloo has published for each process; each entry contains a `sockaddr`.

    Gloo is the library that JAX uses for collectives between CPU processes. The list is empty
    before the first collective, and where the processes do not use gloo. JAX has no public way to
    close gloo's connections.
    """
    client = get_coordination_client()
    if client is None:
        return []
    try:
        return [value for _, value in client.key_value_dir_get_bytes(_GLOO_PREFIX)]
    except jax.errors.JaxRuntimeError:
        return []
