"""What `explain` shows of a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from jaxdist.nn._axis import Axis


def list_facts(
    groups: Any, *, experts: int, top_k: int, slots: int, axis: Axis | None
) -> Mapping[str, str]:
    """Return what a call does, by name.

    Args:
        groups: The tokens, `[groups, tokens, d]`.
        experts: The number of experts.
        top_k: The number of experts of each token.
        slots: The number of tokens of a group that an expert takes.
        axis: The axis over which experts are divided; None for one device.
    """
    count, tokens, width = groups.shape
    devices = 1 if axis is None else axis.size
    # Each replica has groups of its own; the devices of one divide them.
    divides_groups = axis is not None and not axis.is_of_replicas
    own = -(-count // devices) if divides_groups else count
    where = "on one device"
    if axis is not None:
        what = "replicas" if axis.is_of_replicas else "devices"
        where = f"{experts // devices} on each of {devices} {what} of the axis {axis.name!r}"
    divided = f", {own} on a device" if divides_groups else ""
    if divides_groups and count % devices:
        divided += ", and fewer on the last"
    facts = {
        "experts": f"{experts}, {where}; {top_k} for each token",
        "groups": f"{count} of {tokens} tokens{divided}",
        "capacity": f"{slots} tokens of a group for each expert; {own * experts * slots:,} rows "
        f"for {own * tokens * top_k:,} choices",
        "dropped": _describe_drops(tokens, slots),
    }
    if axis is not None:
        sent = own * experts * slots * width * groups.dtype.itemsize * (devices - 1) // devices
        facts["a device sends"] = f"{sent:,} bytes there and {sent:,} back; with gradients twice"
    return facts


def _describe_drops(tokens: int, slots: int) -> str:
    if slots >= tokens:
        return "nothing"
    most = f"{1 - slots / tokens:.1%}"
    return f"at most {most} of the choices, if a group chooses the same experts"
