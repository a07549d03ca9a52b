"""`jaxdist info`: what is here, and what could be."""

import os
import platform
import sys
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxdist.training import EXTRAS, versions


def show_info(console: Console | None = None) -> int:
    """Print versions, devices, topology, memory, and extras.

    Cost:
        Starts JAX's backend. No collective.
    """
    console = console or Console(file=sys.stdout)
    for table in (_versions(), _devices(), _topology(), _extras()):
        console.print(table)
    return 0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions() -> Table:
    table = _table("Versions", "package", "version")
    for name, version in versions().items():
        table.add_row(name, version)
    return table


def _devices() -> Table:
    table = _table(f"Devices ({jax.default_backend()})", "device", "kind", "process", "memory")
    for device in jax.devices():
        memory = device_memory(device)
        table.add_row(str(device), device.device_kind, str(device.process_index), memory)
    return table


def device_memory(device: jax.Device) -> str:
    """Memory of a device in words: its own where the backend tells, the host's on CPU."""
    stats: dict[str, Any] | None = None
    if device.process_index == jax.process_index():
        stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        used = stats.get("bytes_in_use", 0)
        return f"{_gibibytes(stats['bytes_limit'])}, {_gibibytes(used)} in use"
    if device.platform == "cpu":
        total = host_memory_bytes()
        return f"shares the host's {_gibibytes(total)}" if total else "shares the host's"
    return "not told by the backend"


def _gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def host_memory_bytes() -> int | None:
    """Memory of this machine, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _topology() -> Table:
    table = _table("Topology", "what", "value")
    devices = jax.devices()
    table.add_row("processes", f"{jax.process_count()} (this is {jax.process_index()})")
    table.add_row("devices", f"{jax.device_count()}, {jax.local_device_count()} of this process")
    slices = {getattr(d, "slice_index", None) for d in devices} - {None}
    if slices:
        table.add_row("slices", str(len(slices)))
    placed = [d for d in devices if getattr(d, "coords", None) is not None]
    for device in placed:
        core = getattr(device, "core_on_chip", 0)
        table.add_row(f"coords of {device}", f"{tuple(device.coords)} core {core}")
    if not placed:
        table.add_row("coords", "none: these devices have no places in a torus")
    table.add_row("host", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    return table


def _extras() -> Table:
    table = _table("Extras", "extra", "adds", "here", "install")
    for extra in EXTRAS:
        here = (extra.version or "yes") if extra.is_installed else "no"
        table.add_row(
            extra.name, extra.adds, here, "" if extra.is_installed else extra.install_command
        )
    return table
