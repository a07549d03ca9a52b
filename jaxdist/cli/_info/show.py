"""`jaxdist info`: versions, devices, topology, and installed extras."""

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdist._processes import get_current_process
from jaxdist.cli._info.gpus import list_gpu_facts, list_gpu_settings
from jaxdist.cli._info.processes import list_settings
from jaxdist.jobs import versions
from jaxdist.training import EXTRAS


def show_info(console: Console | None = None) -> int:
    """Print versions, devices, topology, memory, and extras.

    Cost:
        Starts the backend of JAX. No collective.
    """
    console = console or Console(file=sys.stdout)
    for table in (
        _make_versions_table(),
        _make_devices_table(),
        _make_topology_table(),
        *_make_gpu_tables(),
        _make_processes_table(),
        _make_extras_table(),
    ):
        console.print(table)
    return 0


def _make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        # Users copy the command from the screen, so it must not wrap.
        table.add_column(column, overflow="fold", no_wrap=column == "install")
    for row in rows:
        # Text, because rich parses brackets in a string as markup and hides their contents.
        table.add_row(*map(Text, row))
    return table


def _make_versions_table() -> Table:
    return _make_table("Versions", ("package", "version"), versions().items())


def _make_devices_table() -> Table:
    rows = [
        (str(d), d.device_kind, str(d.process_index), describe_device_memory(d))
        for d in jax.devices()
    ]
    columns = ("device", "kind", "process", "memory")
    return _make_table(f"Devices ({jax.default_backend()})", columns, rows)


def describe_device_memory(device: jax.Device) -> str:
    """Describe the memory of a device. A CPU device has the memory of the host."""
    stats: dict[str, Any] | None = None
    # JAX raises an error for the memory statistics of a device of another process.
    if device.process_index == get_current_process().index:
        stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        used = stats.get("bytes_in_use", 0)
        return f"{_format_gibibytes(stats['bytes_limit'])}, {_format_gibibytes(used)} in use"
    if device.platform == "cpu":
        total = get_host_memory_bytes()
        return f"shares the host's {_format_gibibytes(total)}" if total else "shares the host's"
    return "not reported by the backend"


def _format_gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def get_host_memory_bytes() -> int | None:
    """Return the memory of this machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _make_topology_table() -> Table:
    devices, process = jax.devices(), get_current_process()
    rows = [
        ("processes", f"{process.count} (this is {process.index})"),
        ("devices", f"{jax.device_count()}, {jax.local_device_count()} of this process"),
        ("host", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
    ]
    # Only TPUs have a slice index and coordinates.
    slices = {getattr(d, "slice_index", None) for d in devices} - {None}
    if slices:
        rows.append(("slices", str(len(slices))))
    placed = [d for d in devices if getattr(d, "coords", None) is not None]
    rows += [(f"coords of {d}", _format_coords(d)) for d in placed]
    if not placed:
        rows.append(("coords", "none: these devices have no places in a torus"))
    return _make_table("Topology", ("what", "value"), rows)


def _format_coords(device: Any) -> str:
    return f"{tuple(device.coords)} core {getattr(device, 'core_on_chip', 0)}"


def _make_gpu_tables() -> list[Table]:
    if jax.default_backend() != "gpu":
        return []
    device = jax.local_devices()[0]
    facts = _make_table("GPUs", ("what", "value"), list_gpu_facts(device.client.platform_version))
    settings = _make_table(
        "Recommended for GPUs (config.gpu_flags gives them as lines for a shell)",
        ("setting", "recommended", "now", "training", "when it helps, and who says so"),
        list_gpu_settings(device.device_kind),
    )
    return [facts, settings]


def _make_processes_table() -> Table:
    rows = [(r.name, r.now, r.who, r.why) for r in list_settings(jax.default_backend())]
    return _make_table("Several processes", ("setting", "now", "who sets it", "what it does"), rows)


def _make_extras_table() -> Table:
    rows = [
        (e.name, e.adds, (e.version or "yes") if e.is_installed else "no", e.install_command)
        for e in EXTRAS
    ]
    return _make_table("Extras", ("extra", "adds", "here", "install"), rows)
