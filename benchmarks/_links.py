"""The links of this machine, measured before the rows whose programs are chosen by them."""

import dataclasses
import pathlib
from collections.abc import Callable

from benchmarks._bench import Bench
from benchmarks._joined import joined
from benchmarks._lines import NoteLine
from jaxdist import cost
from jaxdist.cli import main
from jaxdist.cli._measure import measure

DEVICES = 8
_SIZES = {"1KiB": 1 << 10, "16KiB": 1 << 14, "256KiB": 1 << 18, "2MiB": 1 << 21, "8MiB": 1 << 23}


@dataclasses.dataclass(frozen=True)
class Links:
    """A file for `jaxdist.config.links`, and what was fitted."""

    path: str
    link: cost.Link
    devices: int  # that were measured together

    def note(self, row: str) -> NoteLine:
        """The numbers."""
        link = cost.for_devices(self.link, self.devices)
        return NoteLine(
            row,
            f"fitted {link.name}, {self.devices} devices: alpha {link.alpha * 1e6:.1f} us, "
            f"{link.bytes_per_second / 1e9:.2f} GB/s, memory "
            f"{link.memory_bytes_per_second / 1e9:.2f} GB/s, so leaves are packed below "
            f"{cost.pack_below(link):,} bytes",
        )


def fitted(bench: Bench) -> Links:
    """What `jaxdist bench collectives` finds for the devices of one process."""

    def fit(path: str) -> None:
        bench.options.report("fitting the links of one process")
        sizes = ["1KiB", "64KiB"] if bench.options.is_smoke else list(_SIZES)
        rounds = 1 if bench.options.is_smoke else 5
        bench.process("links").call(fit_one_process, path=path, sizes=sizes, rounds=rounds)
        bench.close("links")

    return _kept(bench, "links", fit, DEVICES)


def fitted_between(bench: Bench, processes: int, devices: int) -> Links:
    """The same between processes of so many devices."""

    def fit(path: str) -> None:
        bench.options.report(f"fitting the links between {processes} processes of {devices}")
        sizes = [1 << 10, 1 << 16] if bench.options.is_smoke else list(_SIZES.values())
        rounds = 1 if bench.options.is_smoke else 5
        group = bench.group("links", processes, devices=devices)
        group.call(fit_between, path=path, sizes=sizes, rounds=rounds)
        bench.close("links")

    return _kept(bench, f"links-{processes}x{devices}", fit, processes * devices)


def _kept(bench: Bench, name: str, fit: Callable[[str], None], devices: int) -> Links:
    if name not in bench.kept:
        path = str(pathlib.Path(bench.folder) / f"{name}.json")
        fit(path)
        (link,) = cost.load_links(path)
        bench.kept[name] = Links(path, link, devices)
    found: Links = bench.kept[name]
    return found


def fit_one_process(path: str, sizes: list[str], rounds: int) -> None:
    """The command, as a user runs it."""
    given = ["bench", "collectives", "--devices", str(DEVICES), "--rounds", str(rounds)]
    main([*given, "--sizes", *sizes, "--save", path])


def fit_between(rank: int, ports: list[int], path: str, sizes: list[int], rounds: int) -> None:
    """The measurement of the command, between processes."""
    layout = joined(rank, ports)
    known = cost.links_of(layout).across
    found = measure(layout, sizes, rounds, known.medium)
    fit = cost.fitted(
        cost.TABLE[known.name],
        found.samples,
        layout.num_replicas,
        found.memory_bytes_per_second,
        found.scatter_gather,
        f"measured between {len(ports)} processes",
    )
    if rank == 0:
        cost.save_links(path, [fit.link], {"num_devices": layout.num_replicas})
