"""What attention takes on a TPU: temporaries and bytes of one layer, compiled for 8 chips."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import nn
from jaxdist.cluster_resolver import TPUClusterResolver

POSITIONS, HEADS, WIDTH, CHIPS = 32_768, 16, 128, 8
MIB = 2**20
PIECE = POSITIONS * HEADS * WIDTH * 2 / CHIPS / MIB  # of q, k or v on a chip


def _compile(kind: str, order: str, heads_of_keys: int = HEADS) -> Any:
    pytest.importorskip("libtpu")
    slice_ = jaxdist.TPUStrategy(TPUClusterResolver("described:v5e:2x4"))
    devices = np.array(slice_.layout.devices).reshape(1, CHIPS)
    mesh = Mesh(devices, ("data", "positions"), axis_types=(AxisType.Auto,) * 2)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    layout = NamedSharding(mesh, PartitionSpec("data", "positions"))

    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            out = nn.attention(q, k, v, causal=True, kind=kind, order=order)
            return (out.astype(jnp.float32) ** 2).sum()

        grads = jax.grad(loss, (0, 1, 2))(q, k, v)
        free = PartitionSpec(None, "positions")
        return [jax.lax.with_sharding_constraint(g, free) for g in grads]

    heads = (HEADS, heads_of_keys, heads_of_keys)
    arrays = tuple(
        jax.ShapeDtypeStruct((1, POSITIONS, n, WIDTH), jnp.bfloat16, sharding=layout) for n in heads
    )
    return strategy.lower(step, arrays).compile().executable


# Temporaries in MiB at most; messages, and bytes sent by theory in MiB.
FIGURES: dict[str, tuple[int, dict[str, int], float]] = {
    "ulysses": (200, {"all-to-all": 8}, 8 * 7 / 8 * PIECE),
    "ulysses by the kernel of JAX": (100, {"all-to-all": 8}, 8 * 7 / 8 * PIECE),
    "ring": (400, {"collective-permute": 44}, 7 * 2 * PIECE + 7 * 6 * PIECE + 2 * PIECE),
    "gather": (650, {"all-gather": 2, "reduce-scatter": 2}, 2 * 7 * 2 * PIECE),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIGURES)
def test_a_layer_of_32768_positions_takes_the_memory_and_sends_the_bytes_of_theory(
    kind: str,
) -> None:
    most, messages, sent = FIGURES[kind]
    has_kernel = "kernel" in kind
    executable = _compile(kind.split()[0], "contiguous" if has_kernel else "zigzag")
    assert ("tpu_custom_call" in executable.as_text()) == has_kernel
    assert executable.memory_analysis().temp_size_in_bytes / MIB < most
    found = jaxdist.hlo.collectives(executable.as_text())
    # Collectives for the results and over the replicas do not belong to the layer.
    of_layer = [c for c in found if c.kind in messages]
    counts = {name: sum(c.times or 0 for c in of_layer if c.kind == name) for name in messages}
    assert counts == messages
    total = sum(c.bytes_sent * (c.times or 0) for c in of_layer) / MIB
    assert total == pytest.approx(sent, rel=0.01)
