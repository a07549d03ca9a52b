"""Reduce-scatters over a whole TPU slice: two stages give the pieces of one operation."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxdist
from jaxdist import partition
from jaxdist._planning import make_axes, put_on_axes
from jaxdist._program.compile import replay
from jaxdist._program.logical.rewrite import ScatterStages, find_stages
from jaxdist.cluster_resolver import TPUClusterResolver


def _add_slice_axis(strategy: jaxdist.Strategy, slices: int) -> jaxdist.Strategy:
    return put_on_axes(strategy, make_axes(in_slices=True, inner={}, logical=1), slices)


# All ways to cut 8 replicas into parts.
SHAPES = [(2, 4), (4, 2)]


def _on(name: str, **options: Any) -> jaxdist.TPUStrategy:
    pytest.importorskip("libtpu")
    return jaxdist.TPUStrategy(TPUClusterResolver(f"described:{name}"), **options)


@pytest.mark.parametrize("axes", [("r",), ("a", "b")])
@pytest.mark.parametrize(("shape", "dim"), list(itertools.product(SHAPES, range(3))))
def test_two_stages_give_every_replica_its_piece(
    shape: tuple[int, int], dim: int, axes: tuple[str, ...]
) -> None:
    grid = np.array(jax.devices()[:8]).reshape(8 if len(axes) == 1 else (2, 4))
    stages = ScatterStages(axes, *shape)
    # Sums of small integers are exact in every order.
    x = np.random.default_rng(0).integers(0, 9, (8, 16, 24, 8)).astype("float32")
    mapped = jax.shard_map(
        lambda x: stages.scatter(x[0], dim),
        mesh=Mesh(grid, axes),
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(*[None] * dim, axes),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), x.sum(0))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("v5e:4x4", (2, 8)),
        ("v5e:16x16", (2, 128)),
        ("v6e:8x8", (2, 32)),
        ("v5p:4x4x4", (4, 16)),
        ("v5p:4x4x8", (4, 32)),
        ("v5e:4x8", None),  # one operation stays a reduce-scatter
        ("v5e:2x2", None),
        ("v5p:2x2x4", None),
        ("v5e:4x4*2", None),
        ("v3:4x4", None),  # two cores of a chip
    ],
)
def test_slices_have_the_stages_of_their_shape(name: str, found: tuple[int, int] | None) -> None:
    layout = _on(name).layout
    stages = find_stages(layout)
    assert stages == (None if found is None else ScatterStages(layout.replica_axes, *found))


@pytest.mark.parametrize(
    ("name", "slices", "found"),
    [
        ("v5e:4x4", 1, ScatterStages(("replica",), 2, 8, frozenset({"slice"}))),
        ("v5e:4x4*2", 2, ScatterStages(("replica",), 2, 8)),
        ("v5p:4x4x4*2", 2, ScatterStages(("replica",), 4, 16)),
        ("v5e:4x8*2", 2, None),
        ("v5e:4x4*2", 4, None),  # half a slice
        ("v5e:4x4*2", 1, None),  # an axis over both slices
    ],
)
def test_an_axis_over_the_chips_of_each_slice_has_the_stages_of_its_shape(
    name: str, slices: int, found: ScatterStages | None
) -> None:
    assert find_stages(_add_slice_axis(_on(name), slices).layout) == found


@pytest.mark.parametrize(
    ("over", "fits"),
    [("replica", True), (("one", "replica"), True), (("slice", "replica"), False), ("one", False)],
)
def test_a_scatter_over_several_slices_has_no_stages(over: Any, fits: bool) -> None:
    stages = ScatterStages(("replica",), 2, 2, frozenset({"one"}))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 1, 4), ("slice", "one", "replica"))
    step = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, over, tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    [mapped] = jax.make_jaxpr(step)(jnp.zeros((1024, 1024))).eqns
    [scatter] = mapped.params["jaxpr"].eqns
    assert stages.fits(scatter) is fits


def test_other_orders_and_logical_devices_and_other_platforms_have_none() -> None:
    topology = jaxdist.tpu.system_of("described:v5p:4x4x4").topology
    ring = jaxdist.tpu.experimental.DeviceAssignment.build(topology, num_replicas=64)
    assert find_stages(_on("v5p:4x4x4", experimental_device_assignment=ring).layout) is None
    topology = jaxdist.tpu.system_of("described:v5e:4x4").topology
    build = jaxdist.tpu.experimental.DeviceAssignment.build
    several = build(topology, [2, 2, 1, 1], num_replicas=4)
    assert find_stages(_on("v5e:4x4", experimental_device_assignment=several).layout) is None
    assert find_stages(jaxdist.MirroredStrategy().layout) is None


def _step(params: Any, x: jax.Array) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w) / 8, None

    def loss(params: Any) -> jax.Array:
        hidden, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.mean((hidden @ params["out"]) ** 2)

    return jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss)(params))


_RULES = partition.Rules({"layers": partition.Shard(2), "out": partition.Shard(0)})


def _place(
    strategy: jaxdist.Strategy, width: int, rules: partition.Rules = _RULES
) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    given = {
        "layers": rng.normal(size=(3, width, width)).astype("float32") / width,
        "out": rng.normal(size=(width, width)).astype("float32"),
    }
    placed = partition.place(strategy, given, rules)
    x = rng.normal(size=(16, width)).astype("float32")
    return placed, jax.device_put(x, strategy.per_replica_sharding)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_with_stages_has_the_gradients_of_one_without(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _place(jaxdist.MirroredStrategy(), 512)
    expected = jaxdist.MirroredStrategy().run(_step, given)
    stages = ScatterStages(jaxdist.MirroredStrategy().layout.replica_axes, *shape)
    monkeypatch.setattr(replay, "find_stages", lambda _: stages)
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(_step, given).compile()
    assert {len(g) for c in program.collectives for g in c.groups} == {8, *shape}
    found = strategy.run(_step, given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_step_on_several_slices_scatters_within_each_in_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = _add_slice_axis(jaxdist.MirroredStrategy(), 2)
    rules = partition.Rules(
        {"layers": partition.Shard(2, axes=("replica",)), "out": partition.Shard(axes=("replica",))}
    )
    given = _place(strategy, 512, rules)
    expected = strategy.run(_step, given)
    monkeypatch.setattr(replay, "find_stages", lambda _: ScatterStages(("replica",), 2, 2))
    strategy = _add_slice_axis(jaxdist.MirroredStrategy(), 2)
    program = strategy.lower(_step, given).compile()
    assert {len(g) for c in program.collectives for g in c.groups} == {2, 4}
    found = strategy.run(_step, given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:4x4x4"])
def test_the_compiler_keeps_both_stages_and_sends_half(name: str) -> None:
    strategy = _on(name)
    abstract = {
        "layers": jax.ShapeDtypeStruct((3, 1024, 1024), "bfloat16"),
        "out": jax.ShapeDtypeStruct((1024, 1024), "bfloat16"),
    }
    rules = partition.Rules({"layers": partition.Shard(1), "out": partition.Shard(0)})
    placed = partition.place(strategy, abstract, rules)
    rows = 8 * strategy.num_replicas_in_sync
    x = jax.ShapeDtypeStruct((rows, 1024), "bfloat16", sharding=strategy.per_replica_sharding)
    program = strategy.lower(_step, (placed, x)).compile()
    sent = sum(c.bytes_sent * (c.times or 1) for c in program.collectives if c.kind != "all-gather")
    # Four gradients of 2 MiB. An all-reduce of each would send twice as much; pieces that the
    # compiler moves by permutations are the rest.
    assert sent < 1.3 * 4 * 1024 * 1024 * 2
    assert not [c for c in program.explain().compiled if c.enlarged]
