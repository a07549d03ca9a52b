"""Stacks of layers are restored in another number of chunks, where the caller says so."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxdist
from jaxdist import partition
from jaxdist._checkpoints.stacks import find_form
from jaxdist.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxdist.training import Checkpoints

LAYERS = 8


class Net(nnx.Module):
    """Stacked kernels in chunks, and a head."""

    def __init__(self, chunks: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        stack = rng.normal(size=(LAYERS, 4, 8)).astype("float32")
        shape = (LAYERS,) if chunks == 1 else (chunks, LAYERS // chunks)
        self.layers = nnx.Dict(kernel=nnx.Param(stack.reshape(*shape, 4, 8)))
        self.head = nnx.Param(rng.normal(size=(8, 8)).astype("float32"))


def _make(chunks: int, seed: int = 0) -> tuple[Net, Any]:
    model = Net(chunks, seed)
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def _train(model: Net, optimizer: Any) -> None:
    optimizer.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))


def _whole(state: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jaxdist.Sharded))
    return [np.asarray(x) for x in leaves]


def _assert_same(found: Any, expected: Any) -> None:
    for new, old in zip(_whole(found), _whole(expected), strict=True):
        np.testing.assert_array_equal(new.reshape(old.shape), old)


def _strategy(replicas: int, stages: int, kind: AxisType = AxisType.Auto) -> Any:
    mesh = jax.make_mesh((replicas, stages), ("data", "stage"), axis_types=(kind, kind))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


@pytest.mark.parametrize(
    ("before", "after", "mesh", "kind"),
    [
        (1, 2, (2, 4), AxisType.Auto),
        (4, 1, (4, 2), AxisType.Auto),
        (2, 4, (4, 2), AxisType.Explicit),
        (2, 2, (2, 4), AxisType.Auto),
    ],
)
@pytest.mark.parametrize("shards", [False, True])
def test_a_model_and_its_moments_move_to_other_stages_and_chunks(
    tmp_path: Path, before: int, after: int, mesh: tuple[int, int], kind: AxisType, shards: bool
) -> None:
    rules = partition.fsdp(min_bytes=0) if shards else partition.replicated()
    saved = _make(before)
    _train(*saved)
    expected = [nnx.state(x) for x in saved]
    first = _strategy(4, 2)
    partition.place(first, saved, rules.on_stages("layers/**", chunks=before))
    strategy, other = _strategy(*mesh, kind), _make(after, seed=1)
    partition.place(strategy, other, rules.on_stages("layers/**", chunks=after))
    kernel: Any = other[0].layers.kernel
    layout = kernel.get_raw_value().sharding if not shards else None
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        if before != after:
            with pytest.raises(CheckpointError, match=r"pass stacks='layers/\*\*'"):
                checkpoints.restore(other)
        checkpoints.restore(other, stacks="layers/**")
    _assert_same([nnx.state(x) for x in other], expected)
    if layout is not None:
        assert kernel.get_raw_value().sharding == layout


def test_plain_arrays_and_new_objects_are_reshaped_too(tmp_path: Path) -> None:
    stack = np.arange(24, dtype=np.int8).reshape(6, 4)
    with Checkpoints(tmp_path) as checkpoints:
        keys = jax.random.split(jax.random.key(0), 6)
        state = {"layers": stack, "scale": np.float64(0.1), "keys": keys}
        checkpoints.save(1, state)
        like = {
            "layers": jax.ShapeDtypeStruct((3, 2, 4), "int8"),
            "scale": np.float64(0),
            "keys": jax.random.split(jax.random.key(1), (3, 2)),
        }
        found = checkpoints.restore(1, like=like, stacks="{layers,keys}")
        newest = checkpoints.restore_latest(like=like, stacks="{layers,keys}")
    assert newest is not None
    for restored in (found, newest):
        np.testing.assert_array_equal(restored.state["layers"], stack.reshape(3, 2, 4))
        assert restored.state["keys"].shape == (3, 2)
        assert restored.state["scale"] == 0.1


def test_a_reshape_that_is_no_stack_or_not_named_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"layers": np.ones((8, 6)), "head": np.ones((4, 2))})
        other = {"layers": np.ones((8, 2, 3)), "head": np.ones((4, 2))}
        with pytest.raises(CheckpointError, match="of another model") as caught:
            checkpoints.restore(other, stacks="layers")
        assert "stacks=" not in str(caught.value)
        named = {"layers": np.ones((2, 4, 6)), "head": np.ones((2, 2, 2))}
        with pytest.raises(CheckpointError, match="of another model"):
            checkpoints.restore(named)
        with pytest.raises(CheckpointError, match=r"1 leaves(.|\n)*stacks='head/\*\*'"):
            checkpoints.restore(named, stacks="layers")
        with pytest.raises(CheckpointError, match="2 of its leaves differ"):
            checkpoints.restore(named, stacks="{layers,head}")
        halves = {"layers": np.ones((2, 4, 6), "float16"), "head": np.ones((4, 2))}
        with pytest.raises(CheckpointError, match="of another model"):
            checkpoints.restore(halves, stacks="layers")
        with pytest.raises(
            ArgumentError, match=r"which matches no leaf(.|\n)*such as head, layers"
        ):
            checkpoints.restore(other, stacks="blocks/**")
        wrong: Any = 3
        with pytest.raises(ArgumentTypeError, match='stacks="layers'):
            checkpoints.restore(other, stacks=wrong)


@pytest.mark.parametrize(
    ("pairs", "form"),
    [
        ([((8, 3), (2, 4, 3))], ((8,), (2, 4))),
        ([((2, 4, 3), (4, 2, 3)), ((2, 4), (4, 2))], ((2, 4), (4, 2))),
        ([((8,), (4, 2))], ((8,), (4, 2))),
        ([((2, 4), (8,))], ((2, 4), (8,))),
        ([((0, 3), (2, 0, 3))], ((0,), (2, 0))),
        ([((8, 3), (8, 3))], None),
        # Layers of 3 numbers, or of 8.
        ([((8, 3), (3, 8))], None),
        ([((8, 3, 3), (3, 8, 8)), ((8, 3), (3, 8))], None),
        ([((2, 2, 2, 3), (8, 3))], None),
        ([((), (1, 1))], None),
        # One stays, or has other chunks.
        ([((8, 3), (2, 4, 3)), ((8, 5), (8, 5))], None),
        ([((8, 3), (2, 4, 3)), ((8, 5), (4, 2, 5))], None),
        ([], None),
    ],
)
def test_all_leaves_of_stacks_change_in_the_same_way(pairs: Any, form: Any) -> None:
    assert find_form(pairs) == form
