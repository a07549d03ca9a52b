"""FSDP, tensor parallelism and both together train as one device does."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import Sharded, partition
from tests.partition.test_rules import grid, mesh
from tests.partition.transformer import Transformer, batches, filled, train_step

STEPS = 50


def across_slices() -> jaxdist.MirroredStrategy:
    """Two slices of two replicas of two logical devices."""
    layout = mesh((2, 2, 2), ("slice", "data", "model"))
    return jaxdist.MirroredStrategy(mesh=layout, replica_axes=("slice", "data"))


def curve(strategy: jaxdist.Strategy, rules: Any) -> tuple[np.ndarray, Any]:
    model = filled(lambda: Transformer(nnx.Rngs(0), 1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if rules is not None:
        partition.place(strategy, (model, optimizer), rules)
    losses = []
    for rows in batches(STEPS):
        batch = jax.device_put(rows, strategy.per_replica_sharding)
        losses.append(strategy.run(train_step, (model, optimizer, batch)))
    return np.asarray(losses), model


@pytest.fixture(scope="module")
def of_one_device() -> np.ndarray:
    found, _ = curve(jaxdist.OneDeviceStrategy("cpu:0"), None)
    assert found[-1] < found[0] / 2, "the model learns"
    return found


@pytest.mark.parametrize(
    ("make", "rules", "in_pieces"),
    [
        (lambda: grid(8, 1), lambda: partition.fsdp(min_bytes=0), True),
        (lambda: grid(4, 2), partition.tensor_parallel, False),
        (lambda: grid(2, 4), partition.tensor_parallel, False),
        pytest.param(
            lambda: grid(4, 2),
            lambda: partition.fsdp_tensor_parallel(min_bytes=0),
            True,
            marks=pytest.mark.slow,
        ),
        (
            across_slices,
            lambda: partition.fsdp_tensor_parallel(min_bytes=0, axes=("data",)),
            True,
        ),
    ],
    ids=["fsdp", "tensor_4x2", "tensor_2x4", "both_4x2", "both_within_slices"],
)
def test_loss_curve_is_that_of_one_device(
    make: Callable[[], jaxdist.Strategy],
    rules: Callable[[], partition.Rules],
    in_pieces: bool,
    of_one_device: np.ndarray,
) -> None:
    found, model = curve(make(), rules())
    np.testing.assert_allclose(found, of_one_device, rtol=1e-4)
    kernel = model.layers[0].mlp.up.kernel.get_raw_value()
    assert isinstance(kernel, Sharded) is in_pieces
