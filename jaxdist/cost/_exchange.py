"""Computes how much longer an all-to-all takes than an all-gather, as its bytes go further."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._called import called, refuse_type
from jaxdist._validate import as_list, show


@called("cost.exchange_factor")
def exchange_factor(devices: Sequence[Any]) -> float:
    """Return the time of an all-to-all as a multiple of that of an all-gather of as many bytes.

    Between TPU chips, a byte of an all-gather goes to a neighbour, and every link is used. In an
    all-to-all, half of the bytes cross the middle of the slice. With L chips along the longest of D
    axes, it takes `L * D / 4` times as long, with or without links that close the rings. GPUs and
    CPU devices reach each other directly.

    Args:
        devices: The devices of one group, `jax.Device`s.

    Returns:
        The factor, 1 or more.

    Raises:
        ArgumentTypeError: A value is not a device.

    Example:
        >>> from jaxdist import cost
        >>> cost.exchange_factor(jax.devices())
        1.0
    """
    remedy = "Pass for instance jax.devices()."
    group = as_list("devices", devices, "a list of devices", remedy)
    for device in group:
        if isinstance(device, jax.Array) or not hasattr(device, "platform"):
            raise refuse_type(f"devices with {show(device)}.", "devices are those of jax.", remedy)
    coords = [getattr(d, "coords", None) for d in group if d.platform == "tpu"]
    if not coords or None in coords:
        return 1.0
    lengths = [len(set(along)) for along in zip(*coords, strict=True)]
    longer = [n for n in lengths if n > 1]
    return max(1.0, max(longer, default=1) * len(longer) / 4)
