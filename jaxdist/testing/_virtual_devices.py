"""Many devices on one machine that has none: CPU devices that JAX makes up."""

import os

import jax

from jaxdist.errors import ArgumentError, ArgumentTypeError, BackendStartedError

_XLA_FLAG = "--xla_force_host_platform_device_count"


def virtual_devices(count: int) -> None:
    """Make JAX show `count` CPU devices; call it before anything touches a device.

    They behave as `count` separate devices and share the cores of this machine, so programs and
    results are those of `count` devices and speed is not.

    Args:
        count: Number of CPU devices. Asking again for the number that is there already is fine
            at any time.

    Raises:
        BackendStartedError: JAX has started with another number of CPU devices, and cannot
            change it any more in this process.
        ArgumentError: `count` is below 1.
        ArgumentTypeError: `count` is not an int.

    Example:
        >>> virtual_devices(8)
        >>> len(jax.devices("cpu"))
        8

    Source:
        Plays the part of `tf.config.set_logical_device_configuration`; JAX's own name for it is
        `jax.config.update("jax_num_cpu_devices", count)`.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise ArgumentTypeError(
            f"virtual_devices takes a number of devices as an int, and {count!r} of type "
            f"{type(count).__name__} was given.\n\nPass for instance virtual_devices(8)."
        )
    if count < 1:
        raise ArgumentError(
            f"virtual_devices({count}): there must be at least one device.\n\n"
            "Pass for instance virtual_devices(8)."
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        present = len(jax.local_devices(backend="cpu"))
        if present != count:
            raise _too_late(count, present) from None


def _too_late(count: int, present: int) -> BackendStartedError:
    flag = next((f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(_XLA_FLAG)), "")
    origin = f" (XLA_FLAGS has {flag}: take it out, or let it say {count})" if flag else ""
    return BackendStartedError(
        f"virtual_devices({count}) comes too late: JAX has already started, with {present} CPU "
        f"device(s){origin}.\n\n"
        "The number of devices is fixed when JAX first touches one (jax.devices(), jnp.zeros(3), "
        "a strategy).\n\n"
        f"Call jaxdist.testing.virtual_devices({count}) first thing, right after the imports. In "
        "a notebook, restart the runtime, then run that cell before any other."
    )
