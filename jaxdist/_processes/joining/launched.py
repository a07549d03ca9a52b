"""Reads the environment variables that `jaxdist launch` sets for its processes."""

import logging
import os

import jax

from jaxdist._called import name_call
from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")
# The address of the coordination service if a launcher hosts it; otherwise process 0 does.
SERVICE = "JAXDIST_SERVICE"
DEVICES_PER_PROCESS = "JAXDIST_DEVICES_PER_PROCESS"


def get_launched_devices() -> int | None:
    """Return the number of CPU devices that the launcher gives each process, or None.

    Raises:
        ArgumentError: The variable is not a positive integer.
    """
    text = os.environ.get(DEVICES_PER_PROCESS, "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError(
            f"The environment variable {DEVICES_PER_PROCESS} is {text!r}.\n\n"
            "It is the number of CPU devices of each process, 1 or more.\n\n"
            "`jaxdist launch --devices-per-process 2` sets it; unset it otherwise."
        )
    return int(text)


def use_launched_devices() -> None:
    """Set the number of CPU devices that the launcher asks for, before JAX starts."""
    caller = name_call()
    count = get_launched_devices()
    if count is None:
        return
    before = jax.config.values["jax_num_cpu_devices"]
    if before not in (-1, count):
        _LOG.warning(
            "%s: this process has %d CPU devices, as the launcher says, and not %d.",
            caller,
            count,
            before,
        )
    jax.config.update("jax_num_cpu_devices", count)
