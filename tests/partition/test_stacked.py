"""Parameters whose dim 0 is over layers: rules are for one layer, and that dim is never cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import partition
from jaxdist.errors import ShapeError


class _Stacked(nnx.Module):
    """A kernel of 64 layers, so that the dim of the layers is the largest."""

    def __init__(self) -> None:
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
        kernel = self.up.kernel[...]
        self.up.kernel = nnx.Param(jnp.stack([kernel * n for n in range(64)]), stacked_layers=True)
        self.scale = nnx.Param(jnp.ones((64, 8)), stacked_layers=True)


def _place(rules: Any, shape: tuple[int, ...], names: tuple[str, ...], axes: Any) -> _Stacked:
    strategy = jaxdist.MirroredStrategy(mesh=jax.make_mesh(shape, names), replica_axes=axes)
    with strategy.scope():
        model = _Stacked()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    partition.place(strategy, (model, optimizer), rules)
    moment: Any = optimizer.opt_state
    mu = moment[0].mu["up"]["kernel"].get_raw_value()
    # Optimizer state is placed as its parameter.
    assert type(mu) is type(model.up.kernel.get_raw_value())
    return model


def test_fsdp_cuts_the_largest_dim_of_one_layer() -> None:
    model = _place(partition.fsdp(min_bytes=0), (8,), ("data",), ("data",))
    held: Any = model.up.kernel.get_raw_value()
    assert (held.dim, held.size, held.array.shape) == (2, 16, (64, 8, 16))
    np.testing.assert_array_equal(held.whole(), _Stacked().up.kernel[...])
    scale: Any = model.scale.get_raw_value()
    assert scale.dim == 1


def test_the_size_of_one_layer_decides_what_stays_whole() -> None:
    # A row of the scale has 32 bytes, and a kernel 512.
    model = _place(partition.fsdp(min_bytes=100), (8,), ("data",), ("data",))
    assert isinstance(model.up.kernel.get_raw_value(), jaxdist.Sharded)
    assert isinstance(model.scale.get_raw_value(), jax.Array)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tensor_parallelism_splits_the_outputs_of_one_layer(is_sharded: bool) -> None:
    ready = (
        partition.fsdp_tensor_parallel(min_bytes=0) if is_sharded else partition.tensor_parallel()
    )
    model = _place(ready, (4, 2), ("data", "model"), ("data",))
    held: Any = model.up.kernel.get_raw_value()
    array = held.array if is_sharded else held
    shapes = {shard.data.shape for shard in array.addressable_shards}
    assert shapes == {(64, 2, 8) if is_sharded else (64, 8, 8)}


def test_a_dim_is_counted_without_that_of_the_layers() -> None:
    rules = partition.Rules([("up/kernel", partition.Split(2))], otherwise=partition.Replicate())
    with pytest.raises(ShapeError, match=r"names dim 2, and the array has 2 dim\(s\)"):
        _place(rules, (4, 2), ("data", "model"), ("data",))
