"""Slices as they are wired, and the order of chips in which the compiler keeps collectives."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import tpu
from jaxdist._devices import chips
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import ArgumentTypeError, TopologyError
from jaxdist.tpu._build import make_ring
from tests.strategies.oracle import refused
from tests.tables import sampled

# The links that MaxText gives libtpu for these slices (`maxtext/utils/accelerator_to_spec_map.py`).
WIRED = {
    "v5e:4x4": (False, False, False),
    "v5e:4x8": (False, False, False),
    "v5e:8x8": (False, False, False),
    "v5e:8x16": (False, True, False),
    "v5e:16x16": (True, True, False),
    "v6e:8x8": (False, False, False),
    "v6e:16x16": (True, True, False),
    "v4:2x2x1": (False, False, False),
    "v4:2x4x4": (False, False, False),
    "v4:4x4x4": (True, True, True),
    "v4:4x4x12": (True, True, True),
    "v5p:2x2x4": (False, False, False),
    "v5p:4x4x4": (True, True, True),
    "v5p:8x16x20": (True, True, True),
    "v5p:12x24x24": (True, True, True),
}


@pytest.mark.parametrize("name", WIRED)
def test_a_slice_has_the_links_of_the_documentation(name: str) -> None:
    assert tpu.slice_of(name).wrap == WIRED[name]


def test_a_description_has_the_links_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = chips.describe_slice
    monkeypatch.setattr(chips, "describe_slice", lambda *a: asked.append(a) or real(*a))
    tpu._system.find("described:v5p:4x4x4")
    tpu._system.find("described:v5e:2x4*2")
    assert [call[2] for call in asked] == [(True,) * 3, (False,) * 3]


@pytest.mark.parametrize(
    ("name", "is_by_row"),
    [
        ("v5p:4x4x4", True),
        ("v5p:4x4x8*2", True),
        ("v4:4x4x4", True),
        ("tpu7x:4x4x4", True),
        ("v5p:2x4x4", False),
        ("v5p:4x4x2*2", False),
        ("v5e:4x8*4", False),
        ("v5e:8x16", False),
        ("v5e:2x2", False),
        ("v3:4x4", False),
    ],
)
def test_cores_of_3d_tori_are_row_by_row_and_others_task_by_task(
    name: str, is_by_row: bool
) -> None:
    slices = tpu.slice_of(name)
    cores = tpu.order_cores(slices.topology, slices.num_slices).tolist()
    assert tpu.is_reordered(slices.topology, slices.num_slices) is is_by_row
    if is_by_row:
        x, y, z, core = (range(n) for n in slices.topology.mesh_shape)
        rows = [[i, j, k, c] for k, j, i, c in itertools.product(z, y, x, core)]
        assert cores == rows
    else:
        assert cores == slices.topology.device_coordinates.reshape(-1, 4).tolist()


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:8x8", "v5e:16x16", "v5e:4x4*3", "v6e:8x8*2"])
def test_cores_of_square_slices_take_their_halves_in_turn(name: str) -> None:
    slices = tpu.slice_of(name)
    assert tpu.is_reordered(slices.topology, slices.num_slices)
    cores = tpu.order_cores(slices.topology, slices.num_slices)
    size, half = slices.shape[0], slices.shape[0] // 2
    for z, of_slice in enumerate(np.split(cores, slices.num_slices)):
        for first in (0, 1):
            rows = [[x, y + first * half, z, 0] for y in range(half) for x in range(size)]
            assert of_slice[first::2].tolist() == rows


def test_what_is_no_topology_of_equal_slices_is_an_error() -> None:
    topology = tpu.slice_of("v5p:2x2x4").topology
    with refused(ArgumentTypeError, "topology='v5p:4x4x4'", "slice_of"):
        tpu.order_cores("v5p:4x4x4")  # type: ignore[arg-type]
    with refused(TopologyError, "num_slices=3", "4 chips in z"):
        tpu.is_reordered(topology, 3)


# What the compiler makes of a reduce-scatter over all chips, in jaxdist's order and in every other
# that was tried. The other kinds of collectives stay what they are.
REDUCE_SCATTER = {
    "v5e:2x2": "all-reduce",
    "v5e:2x4": "reduce-scatter",
    "v5e:4x4": "all-reduce",
    "v5e:4x8": "reduce-scatter",
    "v5e:8x8": "all-reduce",
    "v5e:8x16": "reduce-scatter",
    "v5e:16x16": "all-reduce",
    "v6e:2x2": "all-reduce",
    "v6e:2x4": "reduce-scatter",
    "v6e:4x4": "all-reduce",
    "v6e:4x8": "reduce-scatter",
    "v6e:8x8": "all-reduce",
    "v6e:8x16": "reduce-scatter",
    "v6e:16x16": "all-reduce",
    "v5p:2x2x1": "all-reduce",
    "v5p:2x2x2": "all-reduce",
    "v5p:2x2x4": "all-reduce",
    "v5p:2x4x4": "all-reduce",
    "v5p:4x4x2": "all-reduce",
    "v5p:4x4x4": "all-reduce",
    "v5p:4x4x8": "all-reduce",
    "v5p:4x8x8": "all-reduce",
    "v5p:8x8x8": "all-reduce",
    "v4:2x2x1": "all-reduce",
    "v4:2x2x4": "all-reduce",
    "v4:4x4x4": "all-reduce",
    "v4:4x4x8": "all-reduce",
    "v4:8x8x8": "all-reduce",
    "v3:2x2": "all-reduce",
    "v3:4x4": "all-reduce",
    "v3:8x8": "all-reduce",
    "v2:2x2": "all-reduce",
    "v2:4x4": "all-reduce",
    "v2:8x8": "all-reduce",
}
BODIES = {
    "all-gather": lambda x: jax.lax.all_gather(x, "chip", axis=0, tiled=True)[: x.shape[0]],
    "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "chip", scatter_dimension=0, tiled=True),
    "all-reduce": lambda x: jax.lax.psum(x, "chip"),
    "all-to-all": lambda x: jax.lax.all_to_all(x, "chip", 0, 0, tiled=True),
}
_KIND = re.compile(r"[ )](all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def _compile(devices: Any, kind: str) -> list[str]:
    """Return the collectives of a program with one collective over these devices."""
    mesh = Mesh(np.asarray(devices), ("chip",))
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    mapped = jax.shard_map(
        lambda x: BODIES[kind](2 * x) + 1,
        mesh=mesh,
        in_specs=rows.spec,
        out_specs=rows.spec,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((mesh.size * mesh.size * 8, 512), jnp.bfloat16, sharding=rows)
    text = jax.jit(mapped).lower(x).compile().as_text()
    assert text is not None
    return sorted({*_KIND.findall(text)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", sampled(list(itertools.product(REDUCE_SCATTER, BODIES)), 6, name=" ".join)
)
def test_the_compiler_makes_of_a_collective_over_a_slice_what_the_table_says(
    row: tuple[str, str],
) -> None:
    name, kind = row
    strategy = jaxdist.TPUStrategy(TPUClusterResolver(f"described:{name}"))
    made = REDUCE_SCATTER[name] if kind == "reduce-scatter" else kind
    assert _compile(strategy.layout.devices, kind) == [made]


def compile_in_orders() -> dict[str, list[str]]:
    """Return what becomes of an all-gather over a torus, by the order of chips."""
    cube = tpu.slice_of("v5p:4x4x4")
    system = tpu.system_of("described:v5p:4x4x4")
    ordered = [system.device_at(place) for place in tpu.order_cores(system.topology).tolist()]
    by_host = [device for task in system.devices for device in task]
    build = tpu.experimental.DeviceAssignment.build
    ring = build(system.topology, num_replicas=cube.num_cores).core_assignment
    on_ring = system.device_grid(ring)[:, 0].tolist()
    open_ends = {tuple(d.coords): d for d in chips.describe_slice(cube.name, 1)}
    without = [open_ends[tuple(d.coords)] for d in ordered]
    orders = {"rows": ordered, "hosts": by_host, "ring": on_ring, "without links": without}
    return {order: _compile(devices, "all-gather") for order, devices in orders.items()}


def test_a_torus_keeps_the_all_gather_in_no_other_order_and_not_without_its_links() -> None:
    pytest.importorskip("libtpu")
    # In a process that has compiled other programs before, the compiler may keep it in some of the
    # other orders too.
    code = (
        "import json; from tests.tpu import test_order; "
        "print(json.dumps(test_order.compile_in_orders()))"
    )
    root = pathlib.Path(jaxdist.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("rows") == ["all-gather"]
    assert found == {key: ["all-reduce"] for key in ("hosts", "ring", "without links")}


@given(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=3, max_size=3))
def test_ring_visits_every_chip_once_and_comes_back_over_single_wires(sizes: list[int]) -> None:
    path = make_ring(*sizes)
    assert sorted(path) == sorted(itertools.product(*map(range, sizes)))
    assume(sum(size > 1 for size in sizes) >= 2)
    steps = np.abs(np.diff(np.array([*path, path[0]]), axis=0))
    # Around the torus the last chip of a dim is next to the first.
    steps = np.minimum(steps, np.array(sizes) - steps)
    assert (steps.sum(1) == 1).all()


def test_ring_with_an_odd_size_is_a_plain_order_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert make_ring(3, 2, 1) == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0)]
    assert "3x2x1" in caplog.text
