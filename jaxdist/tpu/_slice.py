"""`topology_of` devices, and `Slice`: the chips and hosts of a slice such as `v4:2x2x1`."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar, final

import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, as_list, check_text, show
from jaxdist.errors import TopologyError
from jaxdist.tpu._order import is_made_of_cubes
from jaxdist.tpu._topology import Topology

DeviceT = TypeVar("DeviceT")
_REMEDY = "Pass TPU devices: jax.devices('tpu'), or those of a topology description."


@called("tpu.topology_of")
def topology_of(devices: Sequence[DeviceT]) -> tuple[Topology, list[list[DeviceT]]]:
    """Return the topology of `devices`, and the devices as `[task][ordinal]` of it.

    Each process is a task. Coordinates count from the lowest coordinates of the devices. Several
    slices are stacked in z, in the order of their `slice_index`; no links connect them.

    Args:
        devices: TPU devices of JAX, or anything with their `coords`, `core_on_chip` and
            `process_index`.

    Raises:
        TopologyError: There are no devices, processes have different numbers of devices, or two
            devices have the same coordinates.
        ArgumentTypeError: A device has no coordinates.

    Example:
        >>> cores = jaxdist.tpu.slice_of("v5e:4x2").cores
        >>> topology, devices = jaxdist.tpu.topology_of(cores)
        >>> topology, devices[1][0].coords
        (Topology(4x2x1 chips, 1 core each, 2 tasks), (2, 0, 0))
    """
    devices = as_list("devices", devices, "a list of TPU devices", _REMEDY)
    if not devices:
        raise refuse(
            "devices=[], which has no devices.",
            "A topology has one device or more.",
            _REMEDY,
            kind=TopologyError,
        )
    # GPUs have `coords` from XLA, but no cores.
    placeless = [
        d for d in devices if any(getattr(d, a, None) is None for a in ("coords", "core_on_chip"))
    ]
    if placeless:
        raise refuse_type(
            f"devices, and {len(placeless)} of {len(devices)} have no coordinates: "
            f"{show(placeless[0])}.",
            "A TPU device has coords, core_on_chip and process_index.",
            _REMEDY,
        )
    places = _compute_coordinates(devices)
    by_task: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        by_task.setdefault(device.process_index, []).append(i)
    tasks = [by_task[task] for task in sorted(by_task)]
    # A topology is a rectangular array `[tasks, devices]`.
    counts = {task: len(by_task[task]) for task in sorted(by_task)}
    if len(set(counts.values())) > 1:
        raise refuse(
            f"devices, and processes have different numbers of them: {counts}.",
            "Every task of a topology has the same number of devices.",
            f"Leave out the devices of processes with fewer than {max(counts.values())}.",
            kind=TopologyError,
        )
    topology = Topology(mesh_shape=places.max(0) + 1, device_coordinates=places[np.array(tasks)])
    return topology, [[devices[i] for i in of_task] for of_task in tasks]


def _compute_coordinates(devices: Sequence[Any]) -> np.ndarray:
    """Return coordinates in one mesh for all slices, `[devices, 4]`."""
    chips = [(*d.coords, 0, 0)[:3] for d in devices]
    places = np.array(
        [(*chip, d.core_on_chip) for chip, d in zip(chips, devices, strict=True)], np.int32
    )
    slices = np.array([getattr(d, "slice_index", None) or 0 for d in devices])
    for index in np.unique(slices):
        # A process may see only a part of a slice; each slice counts from its own first chip.
        mine = slices == index
        places[mine, :3] -= places[mine, :3].min(0)
    # The indices of slices may have gaps, so a slice is moved by the rank of its index.
    depth = int(places[:, 2].max()) + 1
    places[:, 2] += np.searchsorted(np.unique(slices), slices) * depth
    return places


# Cores of a chip that JAX lists as devices, as libtpu describes each generation. On a real v4 the
# two cores of a chip are one device by default (megacore); the description has two.
CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5e": 1, "v5p": 1, "v6e": 1, "tpu7x": 2}
# Generations with chips only in x and y.
_FLAT = frozenset({"v2", "v3", "v5e", "v6e"})
# In these generations, dims of this size have a link from the last chip to the first.
# v2, v3: doi.org/10.1145/3360307 (pods are tori of 16x16 and 32x32). Others:
# cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e and tpu7x; jax-ml.github.io/scaling-book/tpus.
_RING = {"v2": 16, "v3": 32, "v5e": 16, "v6e": 16}
# The largest number of chips of one host in x, y and z.
_HOST = (2, 2, 1)
# Every core is listed, so a typo in a size must not fill the memory. No system has more chips.
_MOST_CHIPS = 2**20
_SHAPE = (
    "the numbers of chips in x, y and z",
    "Pass three integers from 1 up: shape=(2, 2, 1).",
)
_NAME = re.compile(r"^(?P<generation>\w+):(?P<shape>\d+(?:x\d+){1,2})(?:\*(?P<slices>\d+))?$")


@dataclasses.dataclass(frozen=True)
class Core:
    """The location of one core, with the attribute names of a TPU device of JAX."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int


@final
@dataclasses.dataclass(frozen=True)
class Slice:
    """One or more equal TPU slices of one generation, in libtpu's layout.

    Example:
        >>> jaxdist.tpu.slice_of("v4:2x2x1").cores[3]
        Core(id=3, process_index=0, coords=(1, 0, 0), core_on_chip=1, slice_index=0)
    """

    generation: str
    shape: tuple[int, int, int]
    num_slices: int = 1

    @called("tpu.Slice")
    def __post_init__(self) -> None:
        # `jaxdist.tpu.Slice` is public, so it repeats checks that `slice_of` makes on the name.
        if not isinstance(self.generation, str) or self.generation not in CORES_PER_CHIP:
            raise refuse(
                f"generation={show(self.generation)}.",
                f"generation is one of {', '.join(CORES_PER_CHIP)}.",
                "Pass for instance generation='v5e'.",
                kind=TopologyError,
            )
        three = as_list("shape", self.shape, *_SHAPE)
        if len(three) != 3:
            raise refuse(
                f"shape={show(self.shape)}.",
                f"shape is {_SHAPE[0]}.",
                _SHAPE[1],
                kind=TopologyError,
            )
        sizes = [as_integer(f"shape[{i}]", n, least=1) for i, n in enumerate(three)]
        count = as_integer("num_slices", self.num_slices, least=1)
        if math.prod(sizes) * count > _MOST_CHIPS:
            raise refuse(
                f"shape={tuple(sizes)} and num_slices={count}: {math.prod(sizes) * count} chips.",
                f"One job has at most {_MOST_CHIPS} chips.",
                "Pass a smaller shape or fewer slices.",
                kind=TopologyError,
            )

    @property
    def name(self) -> str:
        """The libtpu name of one slice."""
        sizes = self.shape[: 2 if self.generation in _FLAT else 3]
        return f"{self.generation}:{'x'.join(map(str, sizes))}"

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Whether the last chip in x, y and z has a link to the first one.

        Example:
            >>> [jaxdist.tpu.slice_of(name).wrap[:2] for name in ("v5e:8x16", "v5e:16x16")]
            [(False, True), (True, True)]
            >>> jaxdist.tpu.slice_of("v5p:4x4x8").wrap, jaxdist.tpu.slice_of("v5p:2x4x4").wrap
            ((True, True, True), (False, False, False))
        """
        if self.generation in _FLAT:
            x, y, z = (size == _RING[self.generation] for size in self.shape)
        else:
            x = y = z = is_made_of_cubes(self.shape)
        return x, y, z

    @functools.cached_property
    def cores(self) -> tuple[Core, ...]:
        """All cores, host by host; `id` counts the cores of a chip, then x, y, z, then slices."""
        x, y, z = self.shape
        host = [min(most, size) for most, size in zip(_HOST, self.shape, strict=True)]
        hosts_x, hosts_y, hosts_z = (s // h for s, h in zip(self.shape, host, strict=True))
        per_chip = CORES_PER_CHIP[self.generation]
        cores = []
        for s in range(self.num_slices):
            places = itertools.product(range(hosts_z), range(hosts_y), range(hosts_x))
            for task, (hz, hy, hx) in enumerate(places):
                for dy, dx, core in itertools.product(
                    range(host[1]), range(host[0]), range(per_chip)
                ):
                    coords = (hx * host[0] + dx, hy * host[1] + dy, hz)
                    chip = (coords[2] * y + coords[1]) * x + coords[0] + s * x * y * z
                    process = task + s * hosts_x * hosts_y * hosts_z
                    cores.append(Core(chip * per_chip + core, process, coords, core, s))
        return tuple(cores)

    @functools.cached_property
    def topology(self) -> Topology:
        """The topology; further slices follow the first one in z."""
        return topology_of(self.cores)[0]

    @property
    def num_cores(self) -> int:
        """Number of cores of all slices."""
        return math.prod(self.shape) * CORES_PER_CHIP[self.generation] * self.num_slices


@called("tpu.slice_of")
def slice_of(name: str) -> Slice:
    """Return the slice with a name: generation, chips in x, y and z, and number of slices.

    Args:
        name: `"v4:2x2x1"`, `"v5e:4x4"`; `"v5e:4x4*2"` is two slices of 4x4 chips.

    Raises:
        TopologyError: The name has another form, the generation is unknown, the name has layers in
            z for a generation with chips only in x and y, a size is 0, or hosts of 2x2 chips do
            not fill a size.

    Example:
        >>> jaxdist.tpu.slice_of("v4:2x2x2").topology
        Topology(2x2x2 chips, 2 cores each, 2 tasks)
        >>> jaxdist.tpu.slice_of("v5e:4x4*2").num_cores
        32
    """
    check_text("name", name, "v5e:4x4")
    match = _NAME.match(name)
    if match is None:
        raise refuse(
            f"name={name!r}, which does not name a slice of TPUs.",
            "A name is a generation and the chips in x, y and z, and with * the number of slices.",
            "Pass for instance 'v4:2x2x1', 'v5e:4x4', or 'v5e:4x4*2' for two slices.",
            kind=TopologyError,
        )
    generation = match["generation"]
    if generation not in CORES_PER_CHIP:
        raise refuse(
            f"name={name!r} of generation {generation!r}, which is not known.",
            f"The generations are {', '.join(CORES_PER_CHIP)}.",
            "Use one of these, for instance 'v5e:4x4'.",
            kind=TopologyError,
        )
    sizes = [int(size) for size in match["shape"].split("x")]
    x, y, z = (*sizes, 1)[:3]
    count = int(match["slices"] or 1)
    if min(x, y, z, count) < 1:
        raise refuse(
            f"name={name!r} with a size of 0.",
            "Each size, and the number of slices, is 1 or more.",
            f"Pass for instance '{generation}:{'x'.join(str(max(2, n)) for n in sizes)}'.",
            kind=TopologyError,
        )
    if z > 1 and generation in _FLAT:
        raise refuse(
            f"name={name!r} with {z} layers of chips in z.",
            f"Slices of {generation} have chips in x and y only.",
            f"Use {generation}:{x}x{y * z} for as many chips, or {generation}:{x}x{y}*{z * count} "
            f"for slices of {x}x{y}.",
            kind=TopologyError,
        )
    # A size of 1 is part of one host; every larger size is made of whole hosts.
    odd = [size for size in (x, y) if size > 1 and size % 2]
    if odd:
        steps = [int(size in odd) for size in (x, y)]
        less, more = (
            "x".join(map(str, (x + sign * steps[0], y + sign * steps[1], *sizes[2:])))
            for sign in (-1, 1)
        )
        raise refuse(
            f"name={name!r}, in which {odd[0]} is odd.",
            "A slice is made of hosts with 2x2 chips each.",
            f"The nearest slices are {generation}:{less} and {generation}:{more}.",
            kind=TopologyError,
        )
    return Slice(generation, (x, y, z), count)
