"""`jaxdist bench collectives`: the latency and bandwidth of the links of this machine."""

import argparse
import bisect
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxdist import _mesh, _reports, cost
from jaxdist._called import called, refuse
from jaxdist._devices import runtime
from jaxdist._mesh import ReplicaMesh
from jaxdist._reports import Table
from jaxdist._strategies import MultiWorkerMirroredStrategy
from jaxdist._validate import as_path
from jaxdist.cli._measure import COUNTS, MAX_BYTES, measure
from jaxdist.cluster_resolver import choose_resolver, list_training_tasks
from jaxdist.errors import ArgumentError, BackendStartedError

DEFAULT_CPU_DEVICES = 8
LARGEST = 1 << 30  # bytes; crossovers are searched up to this size
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"^(?P<number>\d+) ?(?P<unit>b|kib|mib|gib)?$", re.IGNORECASE)


@called("jaxdist bench")
def bench_collectives(arguments: argparse.Namespace) -> int:
    """Measure all-reduces, print the tables, and save the links.

    Cost:
        Runs all-reduces on all devices for some seconds.
    """
    sizes = sorted({parse_size(text) for text in arguments.sizes})
    if len(sizes) < 2:
        raise ArgumentError(
            f"--sizes {' '.join(arguments.sizes)} was given, {len(sizes)} different size(s).\n\n"
            "Latency and bandwidth are fitted to two sizes or more.\n\n"
            "Pass for instance --sizes 1KiB 1MiB."
        )
    if arguments.rounds < 1:
        raise ArgumentError(
            f"--rounds {arguments.rounds} was given.\n\n--rounds is a number from 1 up.\n\n"
            "Pass for instance --rounds 5."
        )
    # Check this before the measurement, which would be lost.
    if arguments.save:
        arguments.save = as_path("--save", arguments.save, "links.json")
    if arguments.save and not pathlib.Path(arguments.save).absolute().parent.is_dir():
        raise ArgumentError(
            f"--save {arguments.save}: the folder "
            f"{str(pathlib.Path(arguments.save).absolute().parent)!r} does not exist.\n\n"
            "The file is written to a folder that exists.\n\nMake the folder first."
        )
    layout, known = _choose_layout(arguments.devices)
    devices = layout.devices
    # Check this before anything is allocated: too large arrays would make the machine swap.
    limit = MAX_BYTES // len(devices)
    if sizes[-1] > limit or sizes[0] * max(COUNTS) > limit:
        raise ArgumentError(
            f"--sizes {' '.join(arguments.sizes)} was given for {len(devices)} devices.\n\n"
            f"All arrays together take at most {_reports.size(MAX_BYTES)}, and the smallest size "
            f"is measured with {max(COUNTS)} arrays as well.\n\n"
            f"Pass sizes up to {limit:,} bytes, the smallest up to {limit // max(COUNTS):,}."
        )
    # All processes measure together, and one of them prints.
    is_first = layout.process.is_first
    console = Console(file=sys.stdout, quiet=not is_first)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=_reports.is_in_cell()) as progress:
        task = progress.add_task("starting", total=None)

        def advance(what: str, total: int) -> None:
            progress.update(task, description=what, total=total, advance=1)

        measured = measure(layout, sizes, arguments.rounds, known.medium, advance)
    source = (
        f"measured by jaxdist bench collectives: {len(devices)} x {devices[0].device_kind} of "
        f"{layout.process.count if layout.is_shared else 1} process(es), "
        f"{os.cpu_count()} cores, jax {jax.__version__}"
    )
    fit = cost.fitted(
        cost.TABLE[known.name],
        measured.samples,
        len(devices),
        measured.memory_bytes_per_second,
        measured.scatter_gather,
        source,
    )
    parts: list[Table | str] = [*make_tables(fit, measured.samples, len(devices))]
    if arguments.save and is_first:
        notes = {
            "platform": layout.platform,
            "device_kind": devices[0].device_kind,
            "num_devices": len(devices),
            "samples": [[s.count, s.num_bytes, s.seconds] for s in measured.samples],
        }
        cost.save_links(arguments.save, [fit.link], notes)
        parts.append(f"Saved. Use it with JAXDIST_LINKS={arguments.save}")
    text = _reports.as_text(parts, _reports.find_screen_width())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def parse_size(text: str) -> int:
    """Return the bytes in a size such as `64KiB`.

    Raises:
        ArgumentError: The text is not a size, or is 0.
    """
    match = _SIZE.match(text.strip())
    size = int(match["number"]) * _UNITS[(match["unit"] or "b").upper()] if match else 0
    if size < 1:
        raise ArgumentError(
            f"--sizes {text!r} is not a number of bytes above 0.\n\n"
            f"A size is an integer, alone or with one of {list(_UNITS)}.\n\n"
            "Pass for instance --sizes 64KiB 1MiB."
        )
    return size


@called(lambda count: f"--devices {count}")
def _choose_layout(count: int | None) -> tuple[ReplicaMesh, cost.Link]:
    """Return the devices to measure, and the known link between them from the table.

    In a job of several processes, this means the devices of all, and the link between processes.
    The known link supplies properties that are not measured, such as the medium.
    """
    if len(list_training_tasks(choose_resolver())) < 2:
        layout = _mesh.build(_choose_devices(count))
        return layout, cost.links_of(layout).inner
    if count is not None:
        raise refuse(
            "in a job of several processes.",
            "All devices of all processes are measured.",
            "Give jaxdist launch --devices-per-process N instead.",
        )
    layout = MultiWorkerMirroredStrategy().layout
    return layout, cost.links_of(layout).across


def _choose_devices(count: int | None) -> Sequence[jax.Device]:
    if count is not None and count < 2:
        raise ArgumentError(
            f"--devices {count} was given.\n\nAn all-reduce needs 2 devices or more.\n\n"
            "Pass for instance --devices 8; on CPU, that many virtual devices are made."
        )
    try:
        runtime.virtual_devices(count or DEFAULT_CPU_DEVICES)
    except BackendStartedError:
        # JAX has started already, so the number of CPU devices is fixed, but it may be enough.
        if count is not None and len(jax.local_devices()) < count:
            raise
    found = jax.local_devices()
    if len(found) < (count or 2):
        raise ArgumentError(
            f"--devices {count or 2}: this machine has {len(found)} "
            f"{jax.default_backend().upper()} device(s).\n\n"
            "The devices of one kind are measured, 2 or more.\n\n"
            "Set JAX_PLATFORMS=cpu to measure devices of the CPU."
        )
    return found[: count or len(found)]


def make_tables(fit: cost.Fit, samples: Sequence[cost.Sample], num_devices: int) -> Iterator[Table]:
    """Yield the tables: the fitted link, the measured times, and the crossovers of algorithms."""
    link = cost.for_devices(fit.link, num_devices)
    links = cost.Links(link)
    known = cost.for_devices(cost.TABLE[link.name], num_devices)
    rows: tuple[tuple[str, Callable[[cost.Link], float], Callable[[float], str]], ...] = (
        ("alpha: latency of a message", lambda x: x.alpha, _format_time),
        ("beta: bytes/s", lambda x: x.bytes_per_second, _format_rate),
        ("memory bytes/s", lambda x: x.memory_bytes_per_second, _format_rate),
        ("arrays are packed below", cost.pack_below, _reports.size),
        ("reduce-scatter + all-gather / all-reduce", lambda x: x.scatter_gather, _format_ratio),
    )
    yield _make_table(
        f"Link {link.name}, {num_devices} devices",
        ("what", "fitted", "in the table"),
        [
            *((what, form(get(link)), form(get(known))) for what, get, form in rows),
            ("dispatch of a program", _format_time(fit.dispatch_seconds), ""),
            ("median error of the fit", f"{fit.error:.0%}", ""),
        ],
    )
    times = [(str(s.count), f"{s.num_bytes:,}", _format_time(s.seconds)) for s in samples]
    columns = ("arrays", "bytes of each", "measured")
    yield Table("All-reduces", columns, tuple(times), frozenset(columns))
    # Algorithms with "/" run over two levels of links, and only one was measured.
    names = [name for name in cost.ALGORITHMS if name != "xla" and "/" not in name]
    yield _make_table(
        "Algorithms, as predicted from the fit",
        ("algorithm", "faster than xla"),
        [(name, describe_faster_sizes(name, "xla", num_devices, links)) for name in names],
    )


def describe_faster_sizes(one: str, other: str, num_devices: int, links: cost.Links) -> str:
    """Describe the sizes for which one algorithm is predicted to be faster than another."""

    def is_faster(size: int) -> bool:
        mine, theirs = (cost.seconds(a, num_devices, size, links) for a in (one, other))
        return mine < theirs

    spans: list[str] = []
    # Powers of two bracket each crossover; then bisection finds its exact size.
    for low, high in itertools.pairwise(1 << n for n in range(LARGEST.bit_length())):
        before, after = is_faster(low), is_faster(high)
        if before != after:
            edge = bisect.bisect_left(
                range(high), True, low, key=lambda size: is_faster(size) == after
            )
            word = "from" if after else "to" if spans else "below"
            spans.append(f"{word} {_reports.size(edge)}")
    if not spans:
        return "always" if is_faster(1) else f"never, up to {_reports.size(LARGEST)}"
    return " ".join(spans)


def _make_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table whose columns after the first one have numbers with units."""
    return Table(title, columns, tuple(rows), frozenset(columns[1:]))


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.2f} us"


def _format_rate(value: float) -> str:
    return f"{value / 1e9:,.2f} GB/s"


def _format_ratio(value: float) -> str:
    return f"{value:.2f}"
