"""Pictures: each panel has axes, labels and a legend, and nothing is clipped."""

import pathlib
import struct
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from jaxdist import partition
from jaxdist._explain import draw
from jaxdist._explain.replicas import Chips, Replicas
from jaxdist._explain.shards import Leaf
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import ArgumentError

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are made in the test."""
    made: list[Any] = []
    make = draw.make_figure

    def keep(width: float, height: float) -> Any:
        made.append(make(width, height))
        return made[-1]

    monkeypatch.setattr(draw, "make_figure", keep)
    return made


def check_figure(figure: Any, path: pathlib.Path) -> list[Any]:
    """Check a saved picture, and return its panels."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == tuple(figure.canvas.get_width_height())
    renderer = figure.canvas.get_renderer()
    panels = [axis for axis in figure.axes if axis.axison]
    for axis in panels:
        assert axis.get_xlabel()
        assert axis.get_legend() is not None
        assert axis.get_legend().get_texts()
        artists = [*axis.texts, axis.title, axis.xaxis.label, axis.yaxis.label, axis.get_legend()]
        for artist in [*artists, *axis.get_xticklabels(), *axis.get_yticklabels()]:
            box = artist.get_window_extent(renderer)
            if box.width and box.height:
                assert box.x0 >= -1, artist
                assert box.y0 >= -1, artist
                assert box.x1 <= width + 1, artist
                assert box.y1 <= height + 1, artist
    return panels


def words_of(axis: Any) -> set[str]:
    return {text.get_text() for text in axis.texts}


def test_a_strategy_is_drawn_with_its_processes_and_chips(
    figures: list[Any], tmp_path: pathlib.Path
) -> None:
    strategy = jaxdist.TPUStrategy(TPUClusterResolver("virtual:v5e:2x4"))
    path = jaxdist.explain(strategy).save_png(tmp_path / "strategy.png")
    replicas, chips = check_figure(figures[-1], path)
    assert words_of(replicas) == {f"cpu:{n}" for n in range(8)}
    assert words_of(chips) == {str(n) for n in range(8)}
    boxes, *lines = [c for c in chips.collections if len(c.get_paths())][::-1]
    assert sum(len(c.get_segments()) for c in lines) == 10  # the links
    for axis in (replicas, chips):
        legend = [t.get_text() for t in axis.get_legend().get_texts()]
        assert legend[:8] == [f"replica {n}" for n in range(8)]
    assert legend[8:] == ["link between replicas"]
    # A replica has one colour in both panels.
    colours = [patch.get_facecolor() for patch in replicas.patches]
    assert len({*colours}) == 8
    at = {name: number for number, name in enumerate(text.get_text() for text in chips.texts)}
    assert [tuple(boxes.get_facecolor()[at[str(n)]]) for n in range(8)] == colours
    assert (chips.get_xlabel(), chips.get_ylabel()) == ("x of the chip", "y of the chip")


@pytest.mark.parametrize("shape", [(16, 16, 1, 1), (2, 2, 8, 2), (1, 1, 1, 1)])
def test_chips_of_any_slice_are_drawn(
    shape: tuple[int, int, int, int], figures: list[Any], tmp_path: pathlib.Path
) -> None:
    x, y, z, cores = shape
    count = x * y * z * cores
    places = [
        (i, j, k, c) for k in range(z) for j in range(y) for i in range(x) for c in range(cores)
    ]
    chips = Chips(shape, {place: (n, 0) for n, place in enumerate(places)})
    cells = [(n, 0, [f"tpu:{n}"]) for n in range(count)]
    path = draw.draw_strategy(tmp_path / "chips.png", "chips", cells, chips.grid.colours, chips)
    check_figure(figures[-1], path)


def test_arrays_of_any_rank_are_drawn(figures: list[Any], tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    specs = [(), ("a",), (None, "b"), ("a", "b", "c"), (None, None, None, "c")]
    tree = {
        f"a long name, of which only the end is shown, of rank {rank}": jax.device_put(
            jnp.zeros((4,) * rank), NamedSharding(mesh, PartitionSpec(*spec))
        )
        for rank, spec in enumerate(specs)
    }
    path = jaxdist.explain(tree).save_png(tmp_path / "arrays.png")
    memory, *panels = check_figure(figures[-1], path)
    assert memory.get_xlabel() == "bytes on the device"
    assert [t.get_text() for t in memory.get_yticklabels()] == [f"cpu:{n}" for n in range(8)]
    # A bar is as long as the bytes of a device, and has a piece for each name.
    held = [x.addressable_shards[0].data.nbytes for x in tree.values()]
    assert sorted(p.get_width() for p in memory.patches) == sorted(held * 8)
    names = {text.get_text() for text in memory.get_legend().get_texts()}
    assert len(names) == len(tree)
    assert all(name.startswith("...") and name[-1].isdigit() for name in names)
    assert len(panels) == min(len(tree), 6)
    by_boxes = {len(axis.patches) for axis in panels}
    assert by_boxes == {1, 2, 4}


def test_parts_are_drawn_where_they_are(figures: list[Any], tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    placed = partition.place(strategy, {"w": jnp.ones((16, 6))}, partition.fsdp(min_bytes=0))
    path = jaxdist.explain(placed).save_png(tmp_path / "parts.png")
    _, panel = check_figure(figures[-1], path)
    boxes = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in panel.patches]
    assert boxes == [(0, 2 * n, 6, 2) for n in range(8)]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("dim 1", "dim 0")


def test_the_memory_of_a_program_is_drawn(figures: list[Any], tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    options = jaxdist.RunOptions(donate_argnums=(0,))
    x = jax.device_put(jnp.ones((64, 64)), strategy.replicated_sharding)
    report = jaxdist.explain(strategy.lower(lambda x: x @ x, (x,), options=options))
    path = report.save_png(tmp_path / "program.png")
    [panel] = check_figure(figures[-1], path)
    names = [t.get_text() for t in panel.get_yticklabels()]
    widths = [p.get_width() * 1024 for p in panel.patches]
    assert dict(zip(names, widths, strict=True)) == pytest.approx(dict(report.rows()))


def test_arrays_on_the_host_are_drawn_as_no_memory(
    figures: list[Any], tmp_path: pathlib.Path
) -> None:
    leaf = Leaf("x", "other", "float32", (4,), (4,), 4, "on the host")
    path = draw.draw_arrays(
        tmp_path / "none.png", "none", [leaf], {jax.devices()[0]: {"other": 0}}, Replicas()
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_goes_to_a_folder_that_exists(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ArgumentError, match="does not exist"):
        jaxdist.explain(jnp.ones(2)).save_png(tmp_path / "no" / "x.png")


def test_the_text_of_a_pod_has_only_its_first_chips() -> None:
    at = {(x, y, z, 0): (x, 0) for x in range(16) for y in range(20) for z in range(3)}
    lines = list(Chips((16, 20, 3, 1), at).lines())
    assert lines[-1] == "  and 1 plane more of 16 x 20 chips"
    assert lines.count("    and 2 rows more") == 2
    assert all(len(line) < 100 for line in lines)
