"""Stages on several slices of TPUs, on a mesh of the user: what is sent between the slices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import nn, partition
from jaxdist.cluster_resolver import TPUClusterResolver

LAYERS, WIDTH, ROWS = 8, 128, 64


def _step(params: Any, rows: Any) -> Any:
    def loss(params: Any) -> Any:
        return nn.pipeline_loss(
            lambda e, x: x @ e,
            lambda w, x: x + jnp.tanh(x @ w),
            lambda e, x, _: jnp.mean((x @ e) ** 2),
            (params["ends"], params["layers"], params["ends"]),
            rows,
            micro_batches=4,
        )

    found = jax.value_and_grad(loss)(params)
    return jaxdist.get_replica_context().all_reduce("mean", found)


def test_only_activations_and_what_all_stages_share_are_sent_between_slices() -> None:
    pytest.importorskip("libtpu")
    slices = jaxdist.TPUStrategy(TPUClusterResolver("described:v5e:2x2*2")).mesh.devices.ravel()
    devices = mesh_utils.create_hybrid_device_mesh((4, 1), (1, 2), devices=[*slices])
    mesh = Mesh(devices, ("data", "stage"), axis_types=(AxisType.Auto,) * 2)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    shapes = {"ends": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH)}
    avals = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    params = partition.place(strategy, avals, partition.replicated().on_stages("layers"))
    rows = jaxdist.PerReplica.of_global(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    program = strategy.lower(_step, (params, rows)).compile()
    assert {c.kind: c.between_slices for c in program.collectives if "permute" in c.kind} == {
        "collective-permute": True
    }
    reduced = [c for c in program.collectives if c.kind == "all-reduce"]
    sums = {c.between_slices: c.bytes_per_device for c in reduced}
    of_layers, of_ends = 4 * LAYERS // 2 * WIDTH**2, 4 * WIDTH**2
    assert sums[False] >= of_layers
    assert of_ends <= sums[True] < of_layers
