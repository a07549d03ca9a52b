"""Functions that the host of a device computes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on as _compute_on


def on_host(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` computed by the host of the device, inside a compiled program.

    JAX 0.10 has it under another name. Goes when 0.10 goes.
    """
    make: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
    space = jax.memory.Space
    hosted = make(fn, compute_type="device_host", out_memory_spaces=space.Host)
    moved = [jax.device_put(x, space.Host) for x in args]
    return jax.device_put(hosted(*moved), space.Device)
