"""Connection of this process to the other processes of its job."""

from typing import Any

import jax


def is_connected() -> bool:
    """Whether this process has joined the other processes of its job."""
    return jax.distributed.is_initialized()


def connect(**how: Any) -> None:
    """Join the other processes of the job; without arguments, those that JAX detects."""
    # Otherwise JAX's runtime handles SIGTERM itself, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**how)
