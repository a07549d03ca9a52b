"""Parses the device groups of a collective, in every notation of XLA."""

import itertools
import math
import re
from typing import TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]

# The text of `replica_groups=`, up to the next attribute.
GROUPS = re.compile(
    r"replica_groups=(?P<groups>\{\{.*?\}\}|\{\}"
    r"|mesh\[.*?\](?:, device_ids=\(.*?\)\)?)?(?: \{.*?\})?"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
PAIRS = re.compile(r"source_target_pairs=(?P<pairs>\{\{.*?\}\}|\{\})")
_LIST = re.compile(r"\{([\d,]*)\}")
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\](?:<=\[(?P<dims>[\d,]+)\])?(?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<sizes>.*?)\](?:, device_ids=\((?P<devices>.*?\]?(?:T\([\d,]+\))?)\))?"
    r"(?: \{(?P<over>.*?)\})?$"
)
_AXIS = re.compile(
    r"'?(?P<name>[\w.-]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?(?:=(?P<whole>\d+))?"
)


def decoded(text: str, participants: int) -> Groups:
    """Return the groups in the text after `replica_groups=`; `{}` is one group of all devices.

    Example:
        >>> from jaxdist import hlo
        >>> hlo.decoded("[2,4]<=[4,2]T(1,0)", 8)
        ((0, 2, 4, 6), (1, 3, 5, 7))
        >>> hlo.decoded("mesh['a'=2,'b'=4] {'a'}", 8)
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    if text.startswith("mesh["):
        return _parse_mesh(text)
    if text.startswith("["):
        return _as_groups(_parse_iota(text))
    groups = tuple(_parse_numbers(m[1]) for m in _LIST.finditer(text) if m[1])
    return groups or (tuple(range(participants)),)


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Return the `(source, target)` pairs of a collective-permute."""
    numbers = (_parse_numbers(m[1]) for m in _LIST.finditer(text))
    return tuple((source, target) for source, target in numbers)


def find_connected(pairs: tuple[tuple[int, int], ...]) -> Groups:
    """Return the devices that are connected by pairs, such as each ring of a permutation."""
    root: dict[int, int] = {}

    def find(device: int) -> int:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    for source, target in pairs:
        # The smallest device is the root, so the order of the pairs does not matter.
        a, b = sorted((find(source), find(target)))
        root[b] = a
    rings: dict[int, list[int]] = {}
    for device in sorted(root):
        rings.setdefault(find(device), []).append(device)
    return tuple(tuple(ring) for ring in rings.values())


def _parse_numbers(text: str) -> tuple[int, ...]:
    """Return the integers in a comma-separated list."""
    return tuple(int(n) for n in text.split(",") if n)


def _as_groups(array: np.ndarray) -> Groups:
    """Return the rows of an array as groups."""
    return tuple(tuple(int(d) for d in row) for row in array)


def _parse_iota(text: str) -> np.ndarray:
    """Return `[2,4]<=[4,2]T(1,0)`: 0, 1, 2, ... as `[4,2]`, transposed, as `[2,4]`."""
    match = _IOTA.match(text)
    if match is None:
        return np.arange(0)
    shape = _parse_numbers(match["shape"])
    dims = _parse_numbers(match["dims"]) if match["dims"] else shape
    array = np.arange(math.prod(dims)).reshape(dims)
    if match["order"]:
        array = array.transpose(_parse_numbers(match["order"]))
    return array.reshape(shape) if match["dims"] else array


def _parse_mesh(text: str) -> Groups:
    """Return the groups of `mesh['a'=2,'b'=4] {'a'}`, also over parts of axes (`'b':(2)2`)."""
    match = _MESH.match(text)
    if match is None:
        return ()
    sizes = {m["name"]: int(m["whole"]) for m in _AXIS.finditer(match["sizes"])}
    devices = np.arange(math.prod(sizes.values()))
    if given := match["devices"]:
        devices = (
            _parse_iota(given).ravel() if given.startswith("[") else np.array(_parse_numbers(given))
        )
    over = list(_AXIS.finditer(match["over"] or ""))
    # Divide every axis into dims, so that each part of an axis that the groups use consists of one
    # or more dims.
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, whole in sizes.items():
        cuts = {1, whole}
        for m in over:
            if m["name"] == name and m["size"]:
                cuts |= {int(m["before"]), int(m["before"]) * int(m["size"])}
        edges = sorted(cuts)
        for low, high in itertools.pairwise(edges):
            place[name, low] = len(dims)
            dims.append(high // low)
    grid = devices.reshape(dims)
    chosen: list[int] = []
    for m in over:
        low = int(m["before"]) if m["size"] else 1
        high = low * int(m["size"]) if m["size"] else sizes[m["name"]]
        chosen += [d for (n, at), d in place.items() if n == m["name"] and low <= at < high]
    # The devices of a group differ only in the chosen dims.
    rest = [d for d in range(len(dims)) if d not in chosen]
    size = math.prod(dims[d] for d in chosen)
    return _as_groups(grid.transpose([*rest, *chosen]).reshape(-1, size))
