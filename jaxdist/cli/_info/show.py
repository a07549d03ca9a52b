"""`jaxdist info`: prints versions, devices, topology, and installed extras."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxdist._processes import get_current_process
from jaxdist._reports import Table, as_text, find_screen_width, join_items
from jaxdist.cli._info.gpus import list_gpu_facts, list_gpu_settings
from jaxdist.cli._info.processes import list_settings
from jaxdist.jobs import versions
from jaxdist.training import EXTRAS


def show_info(console: Console | None = None, *, shows_all: bool = False) -> int:
    """Print versions, devices, topology, memory, and extras.

    Args:
        console: The console to print to; its width decides how tables wrap. None for stdout.
        shows_all: Whether to list each device, each setting and the commands of all extras.
            Otherwise the text fits on a screen of 80 columns and 50 lines.

    Cost:
        Starts the backend of JAX. Runs no collective.
    """
    width = find_screen_width() if console is None else console.width
    console = console or Console(file=sys.stdout)
    parts = list(_list_all() if shows_all else _list_briefly(width))
    text = as_text(parts, width)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _list_all() -> Iterator[Table | str]:
    yield Table("Versions", ("package", "version"), tuple(versions().items()))
    devices = [
        (str(d), d.device_kind, str(d.process_index), describe_device_memory(d))
        for d in jax.devices()
    ]
    columns = ("device", "kind", "process", "memory")
    yield Table(f"Devices ({jax.default_backend()})", columns, tuple(devices))
    yield Table("Topology", ("what", "value"), tuple(_list_topology()))
    yield from _list_gpus()
    rows = tuple(list_settings(jax.default_backend()))
    yield Table("Several processes", ("setting", "now", "who sets it", "what it does"), rows)
    yield _make_extras_table()
    yield "Extras are installed with"
    yield from (f"  {e.install_command}" for e in EXTRAS)


def _list_briefly(width: int | None) -> Iterator[Table | str]:
    named = [f"{name} {version}," for name, version in versions().items()]
    items = ["Versions:", *named[:-1], named[-1].rstrip(",")]
    yield from join_items(items, width, " ", indent=2)
    grouped: dict[tuple[str, str], list[jax.Device]] = {}
    for device in jax.devices():
        memory = describe_device_memory(device)
        grouped.setdefault((device.device_kind, memory), []).append(device)
    rows = [
        (str(len(devices)), _name_devices(devices), kind, memory)
        for (kind, memory), devices in grouped.items()
    ]
    title = f"Devices ({jax.default_backend()})"
    columns = ("count", "devices", "kind", "memory of each")
    yield Table(title, columns, tuple(rows), frozenset({"count"}))
    yield Table("Topology", ("what", "value"), tuple(_list_topology(of_each_device=False)))
    if jax.default_backend() == "gpu":
        yield next(_list_gpus())
    yield _make_extras_table()
    missing = [f"  {e.install_command}" for e in EXTRAS if not e.is_installed]
    if missing:
        yield from ("Missing extras are installed with", *missing)
    yield "More, such as the settings of several processes: jaxdist info --all"


def _name_devices(devices: Sequence[jax.Device]) -> str:
    names = list(map(str, devices))
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _make_extras_table() -> Table:
    rows = [(e.name, (e.version or "yes") if e.is_installed else "no", e.adds) for e in EXTRAS]
    return Table("Extras", ("extra", "here", "adds"), tuple(rows))


def describe_device_memory(device: jax.Device) -> str:
    """Describe the memory of a device. A CPU device has the memory of the host."""
    stats: dict[str, Any] | None = None
    # JAX raises an error for the memory statistics of another process's device.
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


def _list_topology(*, of_each_device: bool = True) -> Iterator[tuple[str, str]]:
    devices, process = jax.devices(), get_current_process()
    yield "processes", f"{process.count} (this is {process.index})"
    yield "devices", f"{jax.device_count()}, {jax.local_device_count()} of this process"
    yield "host", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    # GPUs have a slice index and coordinates too, but no torus.
    placed = [d for d in devices if d.platform == "tpu" and hasattr(d, "coords")]
    slices = {getattr(d, "slice_index", None) for d in placed} - {None}
    if slices:
        yield "slices", str(len(slices))
    if not placed:
        yield "coords", "none: these devices have no places in a torus"
    elif of_each_device:
        yield from ((f"coords of {d}", _format_coords(d)) for d in placed)
    else:
        yield "coords", f"{_format_coords(placed[0])} to {_format_coords(placed[-1])}"


def _format_coords(device: Any) -> str:
    return f"{tuple(device.coords)} core {getattr(device, 'core_on_chip', 0)}"


def _list_gpus() -> Iterator[Table]:
    if jax.default_backend() != "gpu":
        return
    device = jax.local_devices()[0]
    facts = tuple(list_gpu_facts(device.client.platform_version))
    yield Table("GPUs", ("what", "value"), facts)
    yield Table(
        "Recommended for GPUs (config.gpu_flags gives them as lines for a shell)",
        ("setting", "recommended", "now", "training", "when it helps, and the source"),
        tuple(list_gpu_settings(device.device_kind)),
    )
