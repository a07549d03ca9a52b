"""Draws strategies, arrays and programs with matplotlib, without a display."""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist._explain.replicas import Chips, Replicas
from jaxdist._explain.shards import Leaf, name_device, name_numbers
from jaxdist._reports import (
    CHIP_INCHES,
    PALETTE,
    draw_plane,
    list_patches,
    make_figure,
    make_legend,
    picture_path,
    plural,
    size,
)

# More panels or bars than this cannot be read.
_MOST_PANELS = 6
_MOST_BARS = 32
_MOST_NAMED = 128
_MOST_PLANES = 4
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def draw_strategy(
    path: str | Path,
    title: str,
    cells: Sequence[tuple[int, int, Sequence[str]]],
    colours: Sequence[int],
    chips: Chips | None,
) -> Path:
    """Draw replicas in their colours, and chips with their links.

    Args:
        path: The file.
        title: The title.
        cells: For each replica its number, its process, and the names of its devices.
        colours: The index in the palette of each replica.
        chips: The chips of TPUs.
    """
    target = picture_path(path)
    planes = 0 if chips is None else min(chips.shape[2], _MOST_PLANES)
    logical = max(len(devices) for _, _, devices in cells)
    tall = min(len(cells), _MOST_BARS)
    wide = max(3.5, 1.1 * logical + 2)
    # Planes are below each other, next to the tall panel of the replicas.
    rows = max(1, min(planes, 2))
    columns = -(-planes // rows)
    chips_wide, chips_tall = 0.0, 0.0
    if chips is not None:
        # Each has a legend next to it.
        chips_wide = CHIP_INCHES * chips.shape[0] + 2.6
        chips_tall = CHIP_INCHES * chips.shape[1] + 1.2
    height = max(2.8, 0.36 * tall + 1.6, chips_tall * rows + 0.4)
    figure = make_figure(wide + 1.8 + chips_wide * columns, height)
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[wide, *[chips_wide] * columns])
    axis = figure.add_subplot(grid[:, 0])
    _draw_replicas(axis, cells[:tall], logical, colours)
    if len(cells) > tall:
        axis.set_title(f"the first {tall} of {len(cells)} replicas", fontsize=8)
    for plane in range(planes):
        if chips is not None:
            place = grid[plane // columns, 1 + plane % columns]
            _draw_chips(figure.add_subplot(place), chips, plane)
    figure.suptitle(title, fontsize=9)
    figure.savefig(target)
    return target


def _draw_replicas(
    axis: Any, cells: Sequence[tuple[int, int, Sequence[str]]], wide: int, colours: Sequence[int]
) -> None:
    """Draw a row for each replica with a box for each logical device, in its colour."""
    processes = sorted({process for _, process, _ in cells})
    for row, (replica, _, devices) in enumerate(cells):
        back, front = PALETTE[colours[replica]]
        for column, name in enumerate(devices):
            axis.barh(row, 0.92, left=column - 0.46, height=0.86, color=back)
            if len(cells) * wide <= _MOST_NAMED:
                axis.text(column, row, name, ha="center", va="center", fontsize=7, color=front)
    axis.set_xlim(-0.6, wide - 0.4)
    axis.set_ylim(len(cells) - 0.4, -0.6)
    axis.set_xticks(range(wide))
    names = [
        f"{replica}" if len(processes) == 1 else f"{replica} (process {process})"
        for replica, process, _ in cells
    ]
    axis.set_yticks(range(len(cells)), names, fontsize=7)
    axis.set_xlabel("logical device")
    axis.set_ylabel("replica")
    patches = list_patches(colours)
    _place_legend(axis, [patch for patch, _ in patches], [label for _, label in patches])


def _draw_chips(axis: Any, chips: Chips, plane: int) -> None:
    """Draw one plane of chips with its links, and with the replicas of the cores."""
    draw_plane(axis, chips.grid, plane)
    up = chips.grid.count_links_up(plane)
    links = f", {plural(up, 'link')} to z = {plane + 1}" if up else ""
    axis.set_title(f"z = {plane}{links}", fontsize=8)
    axis.set_xlabel("x of the chip")
    axis.set_ylabel("y of the chip")
    _place_legend(axis, *make_legend(chips.grid))


def draw_arrays(
    path: str | Path,
    title: str,
    leaves: Sequence[Leaf],
    held: dict[jax.Device, dict[str, int]],
    replicas: Replicas,
) -> Path:
    """Draw the parts of arrays, and the memory of each device.

    Args:
        path: The file.
        title: The title.
        leaves: The arrays, the most important first.
        held: For each device, in the order of the bars, the bytes of each use.
        replicas: The replicas of the devices. A part of a single replica is drawn in its colour.
    """
    target = picture_path(path)
    # Layers of a model have equal arrays; one picture shows them all.
    alike: dict[tuple[str, str], list[Leaf]] = collections.defaultdict(list)
    for leaf in leaves:
        if leaf.shards:
            alike[leaf.array, leaf.describe()].append(leaf)
    placed = list(alike.values())[:_MOST_PANELS]
    panels = 1 + len(placed)
    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure = make_figure(4.6 * columns, 3.7 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    _draw_memory(axes[0], held)
    for axis, equal in zip(axes[1:], placed, strict=False):
        more = f", and {len(equal) - 1} like it" if len(equal) > 1 else ""
        _draw_parts(axis, equal[0], more, replicas)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=9)
    figure.savefig(target)
    return target


def _draw_memory(axis: Any, held: dict[jax.Device, dict[str, int]]) -> None:
    """Draw a bar for each device with its bytes by use."""
    devices = list(held)[:_MOST_BARS]
    most = max((sum(held[d].values()) for d in devices), default=0)
    factor, unit = _choose_unit(most)
    for row, device in enumerate(devices):
        left = 0.0
        for number, (use, count) in enumerate(held[device].items()):
            if count:
                colour = _colour(number)
                label = _shorten(use)
                axis.barh(row, count / factor, left=left, color=colour, label=label, height=0.8)
                left += count / factor
    axis.set_yticks(range(len(devices)), [name_device(d) for d in devices], fontsize=7)
    axis.set_ylim(len(devices) - 0.4, -0.6)
    axis.set_xlabel(f"{unit} on the device")
    axis.set_ylabel("device")
    axis.set_title(
        "memory" + (f" of the first {_MOST_BARS} devices" if len(held) > _MOST_BARS else ""),
        fontsize=8,
    )
    _add_legend(axis)


def _draw_parts(axis: Any, leaf: Leaf, more_arrays: str, replicas: Replicas) -> None:
    """Draw the parts of one array over the first two dims that are cut, or over its last two."""
    cut = [dim for dim, ranges in enumerate(leaf.cuts) if len(ranges) > 1]
    others = [dim for dim in range(len(leaf.stored)) if dim not in cut]
    down, right = _choose_dims(cut, others)
    height = leaf.stored[down] if down is not None else 1
    width = leaf.stored[right] if right is not None else 1
    # If a third dim is cut, its parts share a box.
    boxes: dict[Any, list[jax.Device]] = collections.defaultdict(list)
    for index, devices in leaf.holders.items():
        y = index[down] if down is not None else (0, 1)
        x = index[right] if right is not None else (0, 1)
        boxes[y, x] += devices
    for number, ((y, x), devices) in enumerate(boxes.items()):
        shown = name_device(devices[0])
        label = f"part {number}: {plural(len(devices), 'device')}"
        fill, front = _colour(number), "white"
        of = replicas.find(devices)
        if of:
            label = f"part {number}: replica{'s' * (len(of) > 1)} {name_numbers(of)}"
            colour = replicas.find_colour(of)
            fill, front = PALETTE[colour] if colour >= 0 else ("0.4", "white")
        axis.barh(
            (y[0] + y[1]) / 2,
            x[1] - x[0],
            left=x[0],
            height=y[1] - y[0],
            color=fill,
            edgecolor="white",
            label=label,
        )
        if len(boxes) <= _MOST_BARS:
            more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
            middle = (x[0] + x[1]) / 2, (y[0] + y[1]) / 2
            text = shown + more
            axis.text(*middle, text, ha="center", va="center", fontsize=6, color=front)
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)
    axis.set_xlabel("one element" if right is None else f"dim {right}")
    axis.set_ylabel("" if down is None else f"dim {down}")
    if down is None:
        axis.set_yticks([])
    axis.set_title(
        f"{_shorten(leaf.name)}{more_arrays}\n{leaf.array}, {size(leaf.device_bytes)} each",
        fontsize=7,
    )
    if len(boxes) <= 10:
        _add_legend(axis)


def _choose_dims(cut: list[int], others: list[int]) -> tuple[int | None, int | None]:
    """Return the dim to draw downward, and the dim to draw to the right."""
    if len(cut) >= 2:
        return cut[0], cut[1]
    if len(cut) == 1:
        pair = sorted([cut[0], others[-1]]) if others else [None, cut[0]]
        return pair[0], pair[1]
    pair = [None, None, *others][-2:]
    return pair[0], pair[1]


def draw_program(path: str | Path, title: str, rows: Sequence[tuple[str, int]]) -> Path:
    """Draw the memory of a device in a program: a bar for each use.

    Args:
        path: The file.
        title: The title.
        rows: The uses with their bytes; negative bytes are memory that is used twice.
    """
    target = picture_path(path)
    factor, unit = _choose_unit(max((abs(n) for _, n in rows), default=0))
    figure = make_figure(7.5, 0.4 * len(rows) + 1.8)
    axis = figure.subplots()
    for row, (_, count) in enumerate(rows):
        label = "reused or not used" if count < 0 else "used"
        colour = "0.7" if count < 0 else "tab:blue"
        axis.barh(row, count / factor, color=colour, label=label)
        side = "right" if count < 0 else "left"
        text = ("-" if count < 0 else "") + size(abs(count))
        axis.annotate(
            f" {text} ",
            (count / factor, row),
            ha=side,
            va="center",
            fontsize=7,
            annotation_clip=False,
        )
    # Leave room for the numbers behind the bars.
    low, high = axis.get_xlim()
    room = 0.15 * (high - low)
    axis.set_xlim(low - (room if low < 0 else 0), high + room)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(unit)
    axis.set_ylabel("use")
    axis.set_title(title, fontsize=9)
    _add_legend(axis)
    figure.savefig(target)
    return target


def _add_legend(axis: Any) -> None:
    """Add a legend next to the axes, with each label once."""
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    _place_legend(axis, list(once.values()), list(once))


def _place_legend(axis: Any, handles: list[Any], labels: list[str]) -> None:
    axis.legend(
        handles,
        labels,
        fontsize=6,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
    )


def _choose_unit(num_bytes: float) -> tuple[int, str]:
    return next((row for row in _UNITS if num_bytes >= row[0]), _UNITS[-1])


def _colour(number: int) -> str:
    # The ten colours of matplotlib's cycle.
    return f"C{number % 10}"


def _shorten(name: str) -> str:
    """Return the end of a long path: many arrays share the beginning."""
    return name if len(name) <= 40 else f"...{name[-37:]}"
