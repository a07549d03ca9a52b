"""Finds the links between the devices of a layout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._called import called, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_integer, check_instance, show
from jaxdist.cost._chip import CHIPS, devices_per_chip, generation_of
from jaxdist.cost._link import Link, Links
from jaxdist.cost._measured import find_link
from jaxdist.cost._table import TABLE

# (words of a device kind, link inside a machine, link between machines as NVIDIA builds them).
# The first match counts, so the PCIe variants come before the names that they contain.
_GPUS = (
    ("H100 PCIe", "pcie-5", "infiniband-ndr"),
    ("A100-PCIE", "pcie-4", "infiniband-hdr"),
    ("A100 80GB PCIe", "pcie-4", "infiniband-hdr"),
    ("V100-PCIE", "pcie-3", "infiniband-edr"),
    ("P100-PCIE", "pcie-3", "infiniband-edr"),
    ("B200", "nvlink-5", "infiniband-ndr"),
    ("B100", "nvlink-5", "infiniband-ndr"),
    ("B300", "nvlink-5", "infiniband-xdr"),
    ("H100", "nvlink-4", "infiniband-ndr"),
    ("H200", "nvlink-4", "infiniband-ndr"),
    ("GH200", "nvlink-4", "infiniband-ndr"),
    ("A100", "nvlink-3", "infiniband-hdr"),
    ("V100", "nvlink-2", "infiniband-edr"),
    ("P100", "nvlink-1", "infiniband-edr"),
    ("T4", "pcie-3", "ethernet-25"),
)

_GPU_COORDS = 3  # domain, host of the domain, GPU of the host

_GUESSES = {"tpu": ("tpu-v5e-ici", "tpu-v5e-dcn"), "gpu": ("pcie-4", "ethernet-100")}


@called("cost.links_of")
def links_of(layout: ReplicaMesh) -> Links:
    """Return the link between the replicas of one worker, and the link between its workers.

    A worker is a slice of TPUs, an NVLink domain of GPUs, or a process of CPU devices. Measured
    links replace those of the table (`jaxdist.config.links`).

    Example:
        >>> from jaxdist import cost
        >>> links = cost.links_of(MirroredStrategy().layout)
        >>> links.inner.name, links.outer
        ('cpu-threads', None)
    """
    # Check the attributes, so that any mesh with them works. An array has both attributes too, but
    # its `devices` is a method.
    if callable(getattr(layout, "devices", str)) or not hasattr(layout, "platform"):
        raise refuse_type(
            f"layout={show(layout)}.", "layout is a ReplicaMesh.", "Pass strategy.layout."
        )
    workers = {worker_of(d) for d in layout.devices}
    device = layout.devices[0]
    if layout.platform == "cpu":
        # With several processes, JAX runs all collectives by gloo, also within one process.
        link = find_link("cpu-threads" if len(workers) == 1 else "cpu-processes")
        link = for_devices(link, len(layout.devices))
        return Links(link, link if len(workers) > 1 else None)
    kind = str(getattr(device, "device_kind", ""))
    known = _find_names(layout.platform, kind)
    names = known or _GUESSES["tpu" if layout.platform == "tpu" else "gpu"]
    found = [find_link(name) for name in names]
    if layout.platform == "tpu":
        found = [_divide_among_devices(link, kind, layout.devices) for link in found]
    if known is None:
        found = [_mark_as_guess(link, kind) for link in found]
    inner, outer = found
    return Links(inner, outer if len(workers) > 1 else None)


@called("cost.for_devices")
def for_devices(link: Link, count: int) -> Link:
    """Return a link of the table for `count` devices, since CPU devices wait for each other.

    Example:
        >>> from jaxdist import cost
        >>> round(cost.for_devices(cost.TABLE["cpu-threads"], 8).alpha * 1e6)
        24
    """
    remedy = "Pass for instance cost.TABLE['cpu-threads']."
    check_instance("link", link, Link, "a cost.Link", remedy)
    count = as_integer("count", count, least=1)
    # See Note [Shared media].
    if not link.medium.is_shared:
        return link
    return dataclasses.replace(link, alpha=link.alpha * count)


@called("cost.worker_of")
def worker_of(device: Any) -> int:
    """Return the number of the worker of a device.

    A worker has fast links: it is a slice of TPUs, an NVLink domain of GPUs (a machine or a rack),
    or a process of CPU devices. The first of a GPU's `coords` is its domain. A GPU that is only
    described has `slice_index` 0.
    """
    if isinstance(device, jax.Array) or not hasattr(device, "platform"):
        raise refuse_type(
            f"device={show(device)}.",
            "device is a jax.Device.",
            "Pass for instance jax.devices()[0].",
        )
    if device.platform == "cpu":
        # JAX puts all processes of one machine into one slice. They still communicate by gloo.
        return int(device.process_index)
    worker = getattr(device, "slice_index", None)
    if device.platform == "tpu":
        # ICI links join all chips of a slice, including those of different hosts.
        return int(worker or 0)
    coords = getattr(device, "coords", None)
    if coords is not None and len(coords) == _GPU_COORDS:
        return int(coords[0])
    return int(device.process_index if worker is None else worker)


def _find_names(platform: str, kind: str) -> tuple[str, str] | None:
    """Return the names of the links for a device kind, or None if the table has none."""
    lower = kind.lower()
    if platform == "tpu":
        found = generation_of(kind)
        return (f"tpu-{found}-ici", f"tpu-{found}-dcn") if found else None
    return next(((row[1], row[2]) for row in _GPUS if row[0].lower() in lower), None)


def _divide_among_devices(link: Link, kind: str, devices: Sequence[Any]) -> Link:
    """Return the link of a device if more devices share a chip than the table says."""
    name = generation_of(kind)
    share = devices_per_chip(devices) // (CHIPS[name].devices if name else 1)
    # A measured link was measured with these devices, so it must not be divided.
    if share <= 1 or link not in TABLE.values():
        return link
    return dataclasses.replace(
        link,
        bytes_per_second=link.bytes_per_second / share,
        memory_bytes_per_second=link.memory_bytes_per_second / share,
        source=f"1/{share} of a chip, which has {share} devices here: {link.source}",
    )


def _mark_as_guess(link: Link, kind: str) -> Link:
    """Return a link for a device kind that the table lacks, with a source that says so."""
    return dataclasses.replace(
        link, source=f"a guess: the table has no row for {kind!r}, measure it; {link.source}"
    )
