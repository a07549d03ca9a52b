"""Predicts the time of one collective of a compiled program."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, as_list, as_number, check_instance, show
from jaxdist.cost._link import Link, Links
from jaxdist.cost._model import MOST, log2, predict_flat
from jaxdist.cost._nccl import predict_nccl
from jaxdist.hlo import KINDS


@called("cost.collective_seconds")
def collective_seconds(
    kind: str,
    group_size: int,
    num_bytes: int,
    link: Link | Links,
    num_operands: int = 1,
    num_groups: int = 1,
    local: int | None = None,
) -> float:
    """Return the predicted time of one operation of a compiled program.

    Args:
        kind: The name in HLO, such as `all-gather`.
        group_size: The number of devices in one group.
        num_bytes: The bytes of the whole array: the result of an all-gather, the operand of a
            reduce-scatter.
        link: The link between the devices, or the links of groups that span workers.
        num_operands: The number of arrays of the operation.
        num_groups: The number of groups, which work at the same time.
        local: The fewest devices that a group has in one of its workers; None if no group spans
            workers. GPUs of one worker use their network cards side by side. For other devices, it
            chooses the link.

    Example:
        >>> from jaxdist import cost
        >>> f"{cost.collective_seconds('all-gather', 4, 8_000_000, cost.TABLE['nvlink-4']):.2e}"
        '3.18e-05'
        >>> links = cost.Links(cost.TABLE["nvlink-4"], cost.TABLE["infiniband-ndr"])
        >>> f"{cost.collective_seconds('all-gather', 32, 1 << 30, links, local=8):.2e}"
        '2.99e-03'
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise refuse(
            f"kind={show(kind)}.",
            f"kind is one of {', '.join(KINDS)}.",
            "Pass for instance kind='all-gather'.",
        )
    n = as_integer("group_size", group_size, least=1, most=MOST)
    as_number("num_bytes", num_bytes, least=0)
    remedy = "Pass a row of cost.TABLE, or cost.links_of(layout)."
    check_instance("link", link, (Link, Links), "a cost.Link or cost.Links", remedy)
    links = Links(link) if isinstance(link, Link) else link
    num_operands = as_integer("num_operands", num_operands, least=1, most=MOST)
    num_groups = as_integer("num_groups", num_groups, least=1, most=MOST)
    inside = n if local is None else as_integer("local", local, least=1, most=n)
    if n == 1:
        return 0.0
    by_nccl = predict_nccl(kind, n, num_bytes, links, inside)
    if by_nccl is not None:
        return by_nccl
    link = links.inner if inside == n else links.across
    if kind == "all-reduce":
        return predict_flat("xla", n, num_bytes, link, num_operands, num_groups)
    part = 1.0 if kind in ("collective-permute", "collective-broadcast") else (n - 1) / n
    if link.medium.is_shared:
        # `scatter_gather` was measured for a reduce-scatter and an all-gather together; here only
        # one of the two runs. See Note [Shared media].
        waits = num_operands * n * num_groups
        total = num_groups * n * part * num_bytes
        return waits * link.alpha + total / link.bytes_per_second * link.scatter_gather / 2
    steps = 1 if kind == "collective-permute" else log2(n)
    return steps * link.alpha + part * num_bytes / link.bytes_per_second


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
