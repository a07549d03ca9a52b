"""Connection of this process to the other processes of its job."""

from typing import Any

import jax


def is_connected() -> bool:
    """Whether this process has joined the other processes of its job."""
    return jax.distributed.is_initialized()


def connect(**how: Any) -> None:
    """Join the other processes of the job; call it before the first use of a device.

    Cost:
        Waits until all processes have called it.

    Args:
        **how: Arguments of `jax.distributed.initialize`; without any, JAX detects the processes.

    Raises:
        RuntimeError: JAX has started, or this process has joined already.
        ValueError: JAX detects no other processes.

    Source:
        `jax.distributed.initialize`.
    """
    # Otherwise JAX's runtime handles SIGTERM itself, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**how)
