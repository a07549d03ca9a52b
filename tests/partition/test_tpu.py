"""FSDP and tensor-parallel steps compile for described slices of TPUs."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import partition
from jaxdist.cluster_resolver import TPUClusterResolver
from tests.partition.transformer import LENGTH, WIDTH, Transformer, train_step


def on_tpu(name: str, shape: list[int] | None = None, count: int = 1) -> jaxdist.TPUStrategy:
    pytest.importorskip("libtpu")
    resolver = TPUClusterResolver(name)
    if shape is None:
        return jaxdist.TPUStrategy(resolver)
    topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
        topology, shape, num_replicas=count
    )
    return jaxdist.TPUStrategy(resolver, experimental_device_assignment=assignment)


def within_slices() -> jaxdist.MirroredStrategy:
    """The devices of two slices, with an axis over slices and one within them."""
    devices = on_tpu("described:v5e:4x4*2").mesh.devices.reshape(2, 16)
    layout = Mesh(devices, ("slice", "data"), axis_types=(AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=layout, replica_axes=("slice", "data"))


def compiled(strategy: jaxdist.Strategy, rules: partition.Rules) -> Any:
    def make() -> Any:
        model = Transformer(nnx.Rngs(0), 1)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = partition.place(strategy, nnx.eval_shape(make), rules)
    rows = 2 * strategy.num_replicas_in_sync
    layout = strategy.per_replica_sharding
    batch = jax.ShapeDtypeStruct((rows, LENGTH + 1), "int32", sharding=layout)
    return strategy.lower(train_step, (model, optimizer, batch)).compile()


def groups_of(program: Any, kind: str) -> set[int]:
    """The sizes of the groups of all collectives of a kind."""
    return {len(g) for c in program.collectives if c.kind == kind for g in c.groups}


def test_fsdp_on_one_slice_gathers_over_all_replicas() -> None:
    program = compiled(on_tpu("described:v5e:4x4"), partition.fsdp(min_bytes=0))
    assert groups_of(program, "all-gather") == {16}


def test_tensor_parallel_kernels_are_never_brought_together() -> None:
    strategy = on_tpu("described:v5e:4x4", [2, 2, 1, 1], 4)
    program = compiled(strategy, partition.tensor_parallel())
    rows = {tuple(g) for c in program.collectives for g in c.groups}
    assert {(0, 1, 2, 3), (0, 4, 8, 12)} <= rows, "all-reduces of blocks and of gradients"
    # XLA for TPU updates replicated parameters in pieces and gathers these (with adam: three
    # arrays of the embedding); what the layers do is told by the line of the layer.
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    assert not [c.source for c in gathers if "linear.py" in c.source]


@pytest.mark.parametrize(
    ("make", "rules", "gather", "across"),
    [
        (
            lambda: on_tpu("described:v5e:4x4", [2, 2, 1, 1], 4),
            lambda: partition.fsdp_tensor_parallel(min_bytes=0),
            4,
            4,
        ),
        (within_slices, lambda: partition.fsdp(min_bytes=0, axes=("data",)), 16, 2),
    ],
    ids=["fsdp_and_tensor", "within_slices"],
)
def test_pieces_are_gathered_in_their_group(
    make: Callable[[], jaxdist.Strategy],
    rules: Callable[[], partition.Rules],
    gather: int,
    across: int,
) -> None:
    program = compiled(make(), rules())
    assert groups_of(program, "all-gather") == {gather}
    assert across in groups_of(program, "all-reduce")
    if across == 2:
        between = [c for c in program.collectives if c.between_slices]
        assert between
        assert {c.kind for c in between} == {"all-reduce"}
    else:
        largest = max(c.bytes_per_device for c in program.collectives if c.kind == "all-gather")
        assert largest <= 32 * WIDTH * 4


def test_square_kernels_that_lie_both_ways_are_not_sent_between_devices() -> None:
    strategy = on_tpu("described:v5e:4x4", [2, 2, 1, 1], 4)
    split = strategy.experimental_split_to_logical_devices
    square = jax.ShapeDtypeStruct((96, 96), "float32")
    pair = (split(square, [1, 4]), split(square, [4, 1]))
    shapes = jax.eval_shape(optax.adamw(1e-2).init, pair)
    moments = jax.tree_util.tree_map_with_path(
        lambda p, s: pair[p[-1].idx] if s.shape else s, shapes
    )
    state = (pair, moments)

    def step(state: Any, gradients: Any) -> Any:
        weights, moments = state
        updates, moments = optax.adamw(1e-2).update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments

    assert not strategy.lower(step, (state, pair)).compile().collectives
