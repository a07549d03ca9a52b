"""The error for a function with parts on different devices."""

import re

from jaxdist.errors import MixedStrategyError

_ABOUT_DEVICES = "Received incompatible devices for jitted computation"
_DEVICES = re.compile(r"device ids \[([^\]]*)\] on platform (\w+)")


def mixed_devices_error(name: str, error: BaseException) -> MixedStrategyError | None:
    """Return the error for a function that JAX refused because of its devices; None for others.

    JAX refuses such a program when it lowers it. Nothing of it has run.
    """
    if not isinstance(error, ValueError) or _ABOUT_DEVICES not in str(error):
        return None
    sets = dict.fromkeys(f"{platform} {ids}" for ids, platform in _DEVICES.findall(str(error)))
    return MixedStrategyError(
        f"{name} has parts on different devices: {' and '.join(sets)}.\n\n"
        "A jaxdist.function is one program, so its steps, variables and arrays are all on the "
        "devices of one strategy.\n\n"
        "Use one strategy in it, or call a function for each strategy, one after the other, and "
        "take the values from one to the other with jax.device_put."
    )
