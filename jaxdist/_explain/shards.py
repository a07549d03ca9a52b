"""Finds which device has which part of an array, and its bytes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax

# First element, and one past the last element, of each dim.
Index = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of one array that one device has."""

    device: jax.Device
    index: Index
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a pytree, and its placement.

    Args:
        name: Its path in the pytree.
        role: `parameters`, `optimizer`, `batch`, or `other`.
        dtype: The dtype.
        shape: The shape, without padding.
        stored: The shape of the array on the devices, with padding.
        itemsize: Bytes of one element.
        placed: `mirrored`, `per replica`, `sharded`, `on one device`, `on the host`, or `abstract`
            for a shape without devices.
        shards: The parts. Empty for an array on the host, and for a shape without devices.
        axes: For each dim, the names of the mesh axes that cut it.
        memory: The kind of memory, such as `device`.
        use: The name of its use in tables and pictures: its role, but for an `other` array in a
            plain dict, list or tuple the outermost name there, such as `params` or `[0]`.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    itemsize: int
    placed: str
    shards: tuple[Shard, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    memory: str = "device"
    use: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "use", self.use or self.role)

    @property
    def num_bytes(self) -> int:
        """The bytes of the array itself, without padding and counted once."""
        return math.prod(self.shape) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """The bytes of the padding, counted once."""
        return math.prod(self.stored) * self.itemsize - self.num_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes of the largest part."""
        return max((s.num_bytes for s in self.shards), default=0)

    @functools.cached_property
    def holders(self) -> dict[Index, tuple[jax.Device, ...]]:
        """The devices of each part, in the order of the elements."""
        found: dict[Index, list[jax.Device]] = {}
        for shard in sorted(self.shards, key=lambda s: (s.index, s.device.id)):
            found.setdefault(shard.index, []).append(shard.device)
        return {index: tuple(devices) for index, devices in found.items()}

    @functools.cached_property
    def cuts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The ranges into which each dim is cut."""
        rank = len(self.stored)
        return tuple(tuple(sorted({i[d] for i in self.holders})) for d in range(rank))

    @property
    def num_parts(self) -> int:
        """The number of different parts."""
        return len(self.holders)

    @property
    def num_copies(self) -> int:
        """The number of devices that have the same part."""
        return max((len(devices) for devices in self.holders.values()), default=0)

    @property
    def array(self) -> str:
        """Dtype and shape, such as `float32[8, 4]`."""
        return f"{self.dtype}{list(self.shape)}"

    def describe(self) -> str:
        """Return a description of where the array is."""
        if not self.shards:
            return self.placed
        words = [
            f"dim {dim} in {len(ranges)} parts" + _over(self.axes[dim : dim + 1])
            for dim, ranges in enumerate(self.cuts)
            if len(ranges) > 1
        ]
        if self.num_copies > 1:
            whole = "each part" if words else "whole"
            words.append(f"{whole} on {self.num_copies} devices")
        elif not words:
            words.append(f"whole on {name_device(self.shards[0].device)}")
        if self.memory not in ("device", "unpinned_host"):
            words.append(f"in {self.memory}")
        if self.padding_bytes:
            words.append(f"{self.padding_bytes:,} bytes of padding")
        return ", ".join(words)


def _over(axes: tuple[tuple[str, ...], ...]) -> str:
    return f" over {' x '.join(axes[0])}" if axes and axes[0] else ""


def name_device(device: Any) -> str:
    """Return the name of a device, such as `cpu:0`."""
    return f"{device.platform}:{device.id}"


def list_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...], size: int) -> list[Shard]:
    """Return the part of each device, including those of other processes.

    Args:
        sharding: The sharding of the array.
        shape: The shape of the whole array.
        size: Bytes of one element.
    """
    found = []
    for device, slices in sharding.devices_indices_map(shape).items():
        index = tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))
        count = math.prod(stop - start for start, stop in index)
        found.append(Shard(device, index, count * size))
    return found


def list_axes(sharding: jax.sharding.Sharding, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that cut each dim; empty if the sharding has no mesh."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))][:rank]
    sizes = sharding.mesh.shape
    return tuple(
        # An axis of size 1 cuts nothing.
        tuple(a for a in (e if isinstance(e, tuple) else (e,)) if a is not None and sizes[a] > 1)
        for e in entries
    )


def format_index(index: Index, stored: tuple[int, ...]) -> str:
    """Return a part in slice notation, such as `[0:4, :]`."""
    parts = (
        ":" if part == (0, n) else f"{part[0]}:{part[1]}"
        for part, n in zip(index, stored, strict=True)
    )
    return f"[{', '.join(parts)}]"


def name_devices(devices: "tuple[jax.Device, ...] | list[jax.Device]") -> str:
    """Return the names of devices; for runs of consecutive numbers only the first and the last.

    Example:
        >>> name_devices(jax.devices()[:3]), name_devices(jax.devices()[:1])
        ('cpu:0 to 2', 'cpu:0')
    """
    ordered = sorted(devices, key=lambda d: (d.platform, d.id))
    words: list[str] = []
    for platform, group in itertools.groupby(ordered, key=lambda d: d.platform):
        words += [f"{platform}:{run}" for run in _list_runs(d.id for d in group)]
    return ", ".join(words)


def name_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as text; for runs of consecutive numbers only the first and the last.

    Example:
        >>> name_numbers([0, 1, 2, 5]), name_numbers([3]), name_numbers([])
        ('0 to 2, 5', '3', '')
    """
    return ", ".join(_list_runs(sorted(set(numbers))))


def _list_runs(ordered: Iterable[int]) -> Iterator[str]:
    """Yield each run of consecutive numbers as text."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return (f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
