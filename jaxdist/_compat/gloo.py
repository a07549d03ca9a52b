"""Where gloo listens, the library that JAX uses for collectives between CPU processes."""

import jax

from jaxdist._compat.coordination import get_coordination_client

# XLA publishes the address of each process here, in gloo's own binary form.
_PREFIX = "cpu:gloo"


def get_gloo_addresses() -> list[bytes]:
    """Return what gloo has published of each process: its `sockaddr` is a part of each.

    It is empty before the first collective, and where the processes do not use gloo. JAX has no
    public way to close gloo's connections.
    """
    client = get_coordination_client()
    if client is None:
        return []
    try:
        return [value for _, value in client.key_value_dir_get_bytes(_PREFIX)]
    except jax.errors.JaxRuntimeError:
        return []
