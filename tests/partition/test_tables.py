"""Tables of embeddings in the ready rules, and placements that need not divide."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.partition import Shard, Split
from tests.partition.test_rules import grid
from tests.strategies.oracle import refused


class _Model(nnx.Module):
    def __init__(self, rows: int, width: int) -> None:
        self.embed = nnx.Embed(rows, width, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(width, 64, use_bias=False, rngs=nnx.Rngs(0))


def _place(strategy: jaxdist.Strategy, rules: Any, rows: int, width: int) -> Any:
    model = _Model(rows, width)
    partition.place(strategy, model, rules)
    return model.embed.embedding.get_raw_value()


@pytest.mark.parametrize(
    ("rows", "width", "dim"),
    [(96, 24, 1), (96, 20, 0), (90, 24, 1), (90, 20, 0)],
)
def test_fsdp_cuts_columns_of_a_table_if_they_divide(rows: int, width: int, dim: int) -> None:
    held = _place(jaxdist.MirroredStrategy(), partition.fsdp(min_bytes=0), rows, width)
    assert (held.dim, held.size) == (dim, (rows, width)[dim])


@pytest.mark.parametrize(("rows", "split"), [(96, True), (97, False)])
def test_tensor_parallelism_splits_rows_of_a_table_if_they_divide(rows: int, split: bool) -> None:
    held = _place(grid(4, 2), partition.tensor_parallel(), rows, 24)
    own = rows // 2 if split else rows
    assert {s.data.shape for s in held.addressable_shards} == {(own, 24)}
    held = _place(grid(4, 2), partition.fsdp_tensor_parallel(min_bytes=0), rows, 24)
    assert isinstance(held, Sharded)
    assert (held.dim, held.split) == (1, 0 if split else None)
    assert {s.data.shape for s in held.held.addressable_shards} == {(own, 6)}


def test_a_table_alone_is_no_sign_that_rules_know_a_model() -> None:
    tree = {"embed": {"embedding": jnp.ones((8, 4))}, "odd": {"w": jnp.ones((4, 4))}}
    with refused(ArgumentError, "none of the", "Ready-made"):
        partition.place(grid(4, 2), tree, partition.tensor_parallel())


def _cut(shape: tuple[int, ...], placement: Any) -> Any:
    """Return an array of this shape, placed over 4 replicas of 2 logical devices."""
    return partition.place(grid(4, 2), {"w": jnp.ones(shape)}, {"w": placement})["w"]


def test_a_dim_that_need_not_divide_is_chosen_or_left_whole() -> None:
    with refused(ShapeError, "Split(dim=1)", "2 logical devices"):
        _cut((12, 9), Split(1))
    held = _cut((12, 9), Split(1, must_divide=False))
    assert {s.data.shape for s in held.addressable_shards} == {(12, 9)}
    with refused(ShapeError, "4 replicas"):
        _cut((12, 9), Shard(1))
    assert _cut((12, 9), Shard(1, must_divide=False)).dim == 0
    held = _cut((12, 9), Shard(1, pad=True, must_divide=False))
    assert (held.dim, held.has_padding) == (1, True)
    assert _cut((12, 8), Shard(1, 0, must_divide=False)).split == 0
    # A dim that does not exist stays an error.
    with refused(ShapeError, "dim 2"):
        _cut((12, 8), Split(2, must_divide=False))


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((64, 256), 0),  # 16 rows; 64 columns are half a tile
        ((64, 512), 1),  # 16 rows, or 128 columns, of which there are more
        ((32, 256), 1),  # 8 rows are half a tile too
        ((512, 64), 0),
        ((512,), 0),
        ((3, 64, 256), 1),
    ],
)
def test_pieces_of_whole_tiles_come_before_the_largest_dim(
    shape: tuple[int, ...], dim: int
) -> None:
    assert _cut(shape, Shard()).dim == dim


def test_placements_show_what_is_not_the_default() -> None:
    assert repr(Split(1)) == "Split(dim=1)"
    assert repr(Split(1, must_divide=False)) == "Split(dim=1, must_divide=False)"
    assert repr(Shard(must_divide=False)).endswith("min_bytes=0, must_divide=False)")
    for kind in (Split, Shard):
        with refused(ArgumentTypeError, "must_divide"):
            kind(0, must_divide=1)  # type: ignore[arg-type]
