"""The report of `explain` for arrays: where each one is, and the memory of each device."""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxdist._explain.draw import draw_arrays
from jaxdist._explain.findings import Finding, show_findings
from jaxdist._explain.replicas import Replicas
from jaxdist._explain.shards import (
    Index,
    Leaf,
    format_index,
    name_device,
    name_devices,
    name_numbers,
)
from jaxdist._reports import Report, Table, plural, share, size

ROLES = ("parameters", "optimizer", "batch", "other")
# Tables and pictures divide the memory by at most this many uses.
_MOST_USES = 6
# A terminal has room for about this many arrays and parts.
_MOST_ARRAYS = 16
_MOST_PARTS = 32


@dataclasses.dataclass(frozen=True, repr=False)
class ArraysReport(Report):
    """Where arrays are, which part each device has, and what uses the memory.

    Args:
        leaves: The arrays, in the order of the pytree. An array at two places is listed once.
        findings: Possible improvements.
        replicas: The replicas of the devices of the strategy, if one was given.

    Example:
        >>> strategy = MirroredStrategy()
        >>> x = jax.device_put(np.zeros((16, 4), "float32"), strategy.per_replica_sharding)
        >>> report = jaxdist.explain(x)
        >>> report.bytes_on(jax.devices()[0]), report.leaves[0].describe()
        (32, 'dim 0 in 8 parts over replica')
    """

    leaves: tuple[Leaf, ...]
    findings: tuple[Finding, ...] = ()
    replicas: Replicas = dataclasses.field(default_factory=Replicas)

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that have a part of an array."""
        found = {s.device for leaf in self.leaves for s in leaf.shards}
        return tuple(sorted(found, key=lambda d: (d.platform, d.id)))

    @functools.cached_property
    def _bytes(self) -> dict[tuple[jax.Device, str], int]:
        held: collections.Counter[tuple[jax.Device, str]] = collections.Counter()
        for leaf in self.leaves:
            for shard in leaf.shards:
                held[shard.device, leaf.role] += shard.num_bytes
        return dict(held)

    @functools.cached_property
    def _by_use(self) -> dict[str, dict[jax.Device, int]]:
        """The bytes of each use on each device. If there are many uses, the rest are `other`."""
        held: dict[str, dict[jax.Device, int]] = {role: {} for role in ROLES}
        whole: collections.Counter[str] = collections.Counter()
        for leaf in self.leaves:
            whole[leaf.use] += sum(shard.num_bytes for shard in leaf.shards)
        kept = {use for use, _ in whole.most_common(_MOST_USES)}
        # Roles first, then names in their order, then the rest.
        rest = held.pop("other")
        for leaf in self.leaves:
            of = rest
            if leaf.use != "other" and (leaf.use in kept or leaf.use in ROLES):
                of = held.setdefault(leaf.use, {})
            for shard in leaf.shards:
                of[shard.device] = of.get(shard.device, 0) + shard.num_bytes
        return {use: by_device for use, by_device in (*held.items(), ("other", rest)) if by_device}

    def bytes_on(self, device: jax.Device, role: str | None = None) -> int:
        """Return the bytes of all arrays on one device, or of those with a role."""
        roles = ROLES if role is None else (role,)
        return sum(self._bytes.get((device, r), 0) for r in roles)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays, each counted once."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def host_bytes(self) -> int:
        """The bytes of the arrays in the memory of the host."""
        return sum(leaf.num_bytes for leaf in self.leaves if leaf.placed == "on the host")

    def save_png(self, path: str | Path) -> Path:
        """Draw the parts of the largest arrays, and the memory of each device.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A picture cannot be written to the path.
        """
        held = {d: {u: n.get(d, 0) for u, n in self._by_use.items()} for d in self.devices}
        return draw_arrays(path, self._title, self._by_size(), held, self.replicas)

    @property
    def _title(self) -> str:
        on = f"on {plural(len(self.devices), 'device')}" if self.devices else "on no device"
        return f"{plural(len(self.leaves), 'array')}, {size(self.num_bytes)}, {on}"

    def _by_size(self) -> list[Leaf]:
        return sorted(self.leaves, key=lambda leaf: -max(leaf.device_bytes, leaf.num_bytes))

    def parts(self) -> Iterator[Table | str]:
        """Yield tables and sentences."""
        yield self._title
        if self.devices:
            yield self._memory()
        if self.host_bytes:
            yield f"In the memory of the host: {size(self.host_bytes)}"
        yield self._arrays()
        if len(self.leaves) > _MOST_ARRAYS:
            rest = self._by_size()[_MOST_ARRAYS:]
            small = sum(leaf.num_bytes for leaf in rest)
            yield f"  and {plural(len(rest), 'smaller array')}, {size(small)}"
        if len(self.leaves) == 1 and self.leaves[0].shards:
            yield from show_parts(self.leaves[0], self.replicas)
        yield from show_findings(self.findings)

    def _memory(self) -> Table:
        """Return the table of memory. Devices with equal rows are one row."""
        used = [use for use, found in self._by_use.items() if any(found.values())]
        by_row: dict[tuple[int, ...], list[jax.Device]] = {}
        for device in self.devices:
            row = tuple(self._by_use[use].get(device, 0) for use in used)
            by_row.setdefault(row, []).append(device)
        columns = ("each of", *used, "in all")
        return Table(
            "Memory of a device",
            columns,
            tuple(
                (name_devices(devices), *(size(n) for n in row), size(sum(row)))
                for row, devices in by_row.items()
            ),
            frozenset(columns[1:]),
        )

    def _arrays(self) -> Table:
        """Return the table of the largest arrays."""
        most = max((self.bytes_on(d) for d in self.devices), default=0)
        return Table(
            "Arrays, the largest first",
            ("array", "what", "for", "whole", "on a device", "part", "where"),
            tuple(
                (
                    leaf.name,
                    leaf.array,
                    leaf.use,
                    size(leaf.num_bytes),
                    size(leaf.device_bytes),
                    share(leaf.device_bytes / most) if most else "",
                    leaf.describe(),
                )
                for leaf in self._by_size()[:_MOST_ARRAYS]
            ),
            frozenset({"whole", "on a device", "part"}),
        )


def show_parts(leaf: Leaf, replicas: Replicas) -> Iterator[Table | str]:
    """Yield the table of the parts of one array, and a grid of them if two dims are cut."""
    rows: list[tuple[str, ...]] = []
    colours: list[int] = []
    for index, devices in list(leaf.holders.items())[:_MOST_PARTS]:
        held = next(s.num_bytes for s in leaf.shards if s.index == index)
        of = replicas.find(devices)
        row = (format_index(index, leaf.stored), f"{held:,}", name_devices(devices))
        rows.append((*row, name_numbers(of)) if replicas.of else row)
        colours.append(replicas.find_colour(of))
    columns = ("part", "bytes", "on", *(("replica",) if replicas.of else ()))
    numbers = frozenset({"bytes"})
    title = f"Parts of {leaf.name}"
    yield Table(title, columns, tuple(rows), numbers, coloured="replica", colours=tuple(colours))
    if leaf.num_parts > _MOST_PARTS:
        yield f"  and {plural(leaf.num_parts - _MOST_PARTS, 'part')} more"
    if leaf.stored != leaf.shape:
        yield (
            f"  It is stored as {list(leaf.stored)}: {leaf.padding_bytes:,} bytes of padding, at "
            "the end of the dim that is cut"
        )
    cut = [dim for dim, ranges in enumerate(leaf.cuts) if len(ranges) > 1]
    if len(cut) == 2 and leaf.num_parts <= _MOST_PARTS:
        yield "\n".join(_show_grid(leaf, cut[0], cut[1]))


def _show_grid(leaf: Leaf, down: int, right: int) -> Iterator[str]:
    """Yield lines of a grid: the parts of one dim downward, of the other to the right."""
    by_place: dict[tuple[tuple[int, int], tuple[int, int]], str] = {}
    index: Index
    for index, devices in leaf.holders.items():
        by_place[index[down], index[right]] = ",".join(str(d.id) for d in devices)
    heads = [f"{a}:{b}" for a, b in leaf.cuts[right]]
    rows = [
        [f"{a}:{b}", *(by_place.get(((a, b), other), "-") for other in leaf.cuts[right])]
        for a, b in leaf.cuts[down]
    ]
    platform = name_device(leaf.shards[0].device).split(":", maxsplit=1)[0]
    yield f"Numbers of {platform} devices (dim {down} down, dim {right} to the right)"
    cells = [["", *heads], *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        yield "  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip()
