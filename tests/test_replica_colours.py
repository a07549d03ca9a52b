"""Replicas in colours: on a terminal, in a notebook and in pictures, and without colours."""

import io
import itertools
import pathlib
import re
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from rich.style import Style

import jaxdist
from jaxdist import partition, tpu
from jaxdist._gpus import cluster_of
from jaxdist._planning.gpus import _make_places as make_gpu_places
from jaxdist._reports import PALETTE, Grid, Picture, Places, Report, choose_colours
from jaxdist._reports import picture as picture_module
from jaxdist._reports.colours import style_of
from jaxdist.cluster_resolver import TPUClusterResolver

_COLOURED = re.compile(r"\x1b\[38;2;[;\d]*m([^\x1b]*)\x1b\[0m")


def _luminance(name: str) -> float:
    """The relative luminance of WCAG 2."""
    triple = Style.parse(name).color.get_truecolor()  # type: ignore[union-attr]
    parts = [v / 255 for v in triple]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_on_each_colour_can_be_read_and_no_two_colours_are_alike() -> None:
    for back, front in PALETTE:
        light, dark = sorted((_luminance(back), _luminance(front)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (back, front)
    triples = [np.array([int(back[i : i + 2], 16) for i in (1, 3, 5)]) for back, _ in PALETTE]
    for one, other in itertools.combinations(triples, 2):
        assert np.abs(one - other).sum() >= 80


def _make_places(name: str, logical: list[int] | None = None) -> Places:
    topology = tpu.slice_of(name).topology
    logical = logical or [1, 1, 1, 1]
    count = int(np.prod(topology.mesh_shape) // np.prod(logical))
    build = tpu.experimental.DeviceAssignment.build
    return Places.from_assignment(build(topology, logical, num_replicas=count), 1)


_SLICES: dict[str, tuple[str, list[int] | None]] = {
    "2x4": ("v5e:2x4", None),
    "16x16": ("v5e:16x16", None),
    "16x16 in 2x2": ("v5e:16x16", [2, 2, 1, 1]),
    "4x4x4": ("v5p:4x4x4", None),
    "4x4x4 in 2x1x1": ("v5p:4x4x4", [2, 1, 1, 1]),
    "8x8x8 in 2x2x2": ("v5p:8x8x8", [2, 2, 2, 1]),
    "two cores": ("v4:2x2x2", None),
    "a core each": ("v4:2x2x2", [1, 1, 1, 2]),
}


@pytest.mark.parametrize("name", _SLICES)
def test_replicas_that_touch_have_different_colours(name: str) -> None:
    grid = Picture(_make_places(*_SLICES[name]), name).grid
    colours = grid.colours
    replicas = grid.replicas
    # An own walk over the chips: each of them and the next one in x, y and z.
    for axis in range(3):
        one = np.moveaxis(replicas, axis, 0)[:-1].reshape(-1, replicas.shape[3])
        other = np.moveaxis(replicas, axis, 0)[1:].reshape(-1, replicas.shape[3])
        for first, second in zip(one.tolist(), other.tolist(), strict=True):
            for a, b in itertools.product(first, second):
                assert a == b or colours[a] != colours[b]
    assert len(colours) == replicas.max() + 1
    if len(colours) <= 8:
        assert sorted(colours) == list(range(len(colours)))


@pytest.mark.parametrize("count", [1, 8, 9, 64])
def test_colours_repeat_after_8_replicas(count: int) -> None:
    assert choose_colours(count) == tuple(n % 8 for n in range(count))


@pytest.mark.parametrize("width", [60, 80, 120, None])
@pytest.mark.parametrize("name", _SLICES)
def test_chips_are_printed_with_each_replica_and_each_link(name: str, width: int | None) -> None:
    grid = Picture(_make_places(*_SLICES[name]), name).grid
    lines = list(grid.lines(width))
    x, y, z, _ = grid.replicas.shape
    shown = [k for k in range(z) if any(re.search(rf"\bz = {k}\b", line) for line in lines)]
    names = {
        name
        for i, j, k in itertools.product(range(x), range(y), shown)
        for name, _ in grid.names(i, j, k)
    }
    words = re.split(r"[-\s,|]+", " ".join(lines[2:]))
    assert names <= {*words}
    assert width is None or max(map(len, lines)) <= width
    # Between two rows, each column has a line for its link.
    bars = sum(line.count("|") for line in lines)
    assert bars == len(shown) * x * (y - 1)
    assert len(shown) == z or "more of" in lines[-1]


def _print(report: Report | Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    Console(file=out, width=80, **options).print(report)
    return out.getvalue()


def explain_slice() -> Report:
    return jaxdist.explain(jaxdist.TPUStrategy(TPUClusterResolver("virtual:v5e:2x4")))


def explain_devices() -> Report:
    return jaxdist.explain(jaxdist.MirroredStrategy())


def explain_parts() -> Report:
    strategy = jaxdist.MirroredStrategy()
    placed = partition.place(strategy, {"w": jnp.ones((16, 6))}, partition.fsdp(min_bytes=0))
    return jaxdist.explain(placed, strategy)


@pytest.mark.parametrize("make", [explain_slice, explain_devices, explain_parts])
def test_replicas_have_their_colours_on_a_terminal_and_in_a_notebook(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    report = make()
    coloured = _print(report, monkeypatch, force_terminal=True, color_system="truecolor")
    found = _COLOURED.findall(coloured)
    # Every replica, in the table and on the chips.
    assert {*found} == {str(n) for n in range(8)}
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == f"{report}\n"
    # In HTML: the same pieces have the same colours.
    html = report._repr_html_()
    pieces = re.findall(r'<span style="color:(#\w+);background:(#\w+)">(\d)</span>', html)
    assert sorted(number for *_, number in pieces) == sorted(found)
    for front, back, number in pieces:
        assert (back, front) == PALETTE[int(number)]


@pytest.mark.parametrize("make", [explain_slice, explain_devices, explain_parts])
def test_without_colours_the_text_still_has_the_replicas(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    report = make()
    plain = _print(report, monkeypatch, force_terminal=True, color_system="truecolor")
    assert "\x1b[3" not in plain
    assert "\x1b[4" not in plain
    monkeypatch.delenv("NO_COLOR")
    piped = _print(report, monkeypatch)
    assert piped == f"{report}\n"
    lines = piped.splitlines()
    head = next(n for n, line in enumerate(lines) if re.search(r"^  (replica|part) ", line))
    # The column of the replicas is the first one, or the last one of parts.
    column = lines[head].split().index("replica")
    assert [line.split()[column and -1] for line in lines[head + 1 : head + 9]] == list("01234567")


def test_parts_that_several_replicas_have_name_them_and_have_no_colour() -> None:
    strategy = jaxdist.MirroredStrategy()
    report = jaxdist.explain(jax.device_put(jnp.ones(8), strategy.replicated_sharding), strategy)
    assert re.search(r"\[:\] +32 +cpu:0 to 7 +0 to 7\b", report.text())
    assert "<span" not in report._repr_html_()


@pytest.mark.parametrize("name", ["16x16 in 2x2", "4x4x4", "8x8x8 in 2x2x2", "two cores"])
def test_a_plan_is_drawn_with_replicas_links_and_a_legend(
    name: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = Picture(_make_places(*_SLICES[name]), "a plan")
    written = picture.draw(tmp_path / "plan.svg")
    # The texts of an SVG are paths, unless matplotlib writes them as text.
    root = ET.parse(written).getroot()
    comments = written.read_text()
    fills = {*re.findall(r"fill: (#[0-9a-f]{6})", comments)}
    used = {PALETTE[colour][0] for colour in picture.grid.colours}
    assert used <= fills
    assert root.tag.endswith("svg")
    up = ["link to the next plane"] if picture.grid.replicas.shape[2] > 1 else []
    for words in ("link between replicas", "a plan", *up):
        assert f"<!-- {words}" in comments
    grid: Grid = picture.grid
    for number in (0, grid.num_replicas - 1):
        first = f"{number}.0" if grid.is_split else f"{number}"
        assert f"<!-- {first} -->" in comments
    assert style_of(0).endswith(PALETTE[0][0])


@pytest.mark.parametrize("name", ["2x4", "16x16 in 2x2", "4x4x4 in 2x1x1"])
def test_a_long_title_does_not_cover_the_legend(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    made: list[Any] = []
    make = picture_module.make_figure

    def keep(width: float, height: float) -> Any:
        made.append(make(width, height))
        return made[-1]

    monkeypatch.setattr(picture_module, "make_figure", keep)
    title = "Plan of train_step for v5e:4x4: 16 chips, 8 replicas x 2 logical devices"
    Picture(_make_places(*_SLICES[name]), title).draw(tmp_path / "plan.png")
    figure = made[-1]
    renderer = figure.canvas.get_renderer()
    [legend] = figure.legends
    own = legend.get_window_extent(renderer)
    others = [figure._suptitle, *(axis.title for axis in figure.axes)]
    others += [text for axis in figure.axes for text in axis.texts]
    for other in others:
        assert not own.overlaps(other.get_window_extent(renderer)), other


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100:4x8", "  NVLink joins the GPUs of a row"),
        ("gb200:2x18x4", "  NVLink joins all GPUs of a domain"),
    ],
)
def test_gpus_are_joined_by_a_switch_and_have_no_lines(
    name: str, words: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = Picture(make_gpu_places(cluster_of(name), 4), name)
    lines = list(picture.grid.lines())
    assert lines[1] == words
    assert not any("|" in line or "--" in line for line in lines)
    drawn = picture.draw(tmp_path / "gpus.svg").read_text()
    assert "<!-- joined by NVLink -->" in drawn
    assert "<!-- link between replicas -->" not in drawn
