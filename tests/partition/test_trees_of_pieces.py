"""Trees with arrays in pieces in functions of JAX, and in libraries that save arrays."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import ArgumentError, JaxdistError, MissingNameError, UnsupportedError
from tests.strategies.oracle import refused

RULES = partition.fsdp(min_bytes=0)
EVEN = {"w": np.arange(48, dtype="float32").reshape(8, 6), "b": np.arange(8, dtype="float32")}
PADDED = {"w": np.arange(54, dtype="float32").reshape(9, 6), "b": np.arange(7, dtype="float32")}


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _strategy() -> Any:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def _place(source: Any) -> Any:
    return partition.place(_strategy(), source, RULES)


def _shapes(source: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), source)


def _whole(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.whole() if _is_sharded(x) else x, tree, is_leaf=_is_sharded)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree, is_leaf=_is_sharded)


def _check(tree: Any, source: Any) -> None:
    assert tree.keys() == source.keys()
    for name, value in tree.items():
        np.testing.assert_array_equal(np.asarray(value), source[name])


def _fill(shape: Any, source: Any) -> Any:
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda part: source[part])


def test_a_placed_model_is_filled_piece_by_piece() -> None:
    read: list[Any] = []

    class File:
        """An array that notes which parts are read."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __getitem__(self, part: Any) -> np.ndarray:
            read.append(self.array[part].shape)
            return self.array[part]

    files = {name: File(array) for name, array in EVEN.items()}
    made = jax.tree.map(_fill, _place(_shapes(EVEN)), files, is_leaf=_is_sharded)
    assert sorted(set(read)) == [(2,), (2, 6)]
    placed = partition.place(_strategy(), made, RULES)
    assert all(map(_is_sharded, placed.values()))
    _check(placed, EVEN)


def test_padding_has_no_sharding_of_jax() -> None:
    placed = _place(PADDED)
    assert not hasattr(placed["w"], "sharding")
    with refused(MissingNameError, "7 elements of dim 0", "partition.place"):
        _shardings(placed)
    even = _place(EVEN)["w"]
    assert even.sharding == even.held.sharding


PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "tree.map": lambda placed, plain: jax.tree.map(jnp.add, placed, plain),
    "tree_map_with_path": lambda placed, plain: jax.tree_util.tree_map_with_path(
        lambda _, a, b: a + b, placed, plain
    ),
    "tree.broadcast": lambda placed, plain: jax.tree.broadcast(placed, plain),
    "out_shardings": lambda placed, plain: jax.jit(
        lambda x: x, out_shardings=jax.tree.map(lambda x: x.sharding, placed)
    )(plain),
    "in_shardings": lambda placed, plain: jax.jit(
        lambda x: x, in_shardings=(jax.tree.map(lambda x: x.sharding, placed),)
    )(plain),
    "device_put": lambda placed, plain: jax.device_put(
        plain, jax.tree.map(lambda x: x.sharding, placed)
    ),
}


@pytest.mark.parametrize("source", [EVEN, PADDED], ids=["even", "padded"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_tree_of_pieces_beside_a_tree_of_arrays_is_a_named_error(name: str, source: Any) -> None:
    plain = jax.tree.map(jnp.asarray, source)
    with refused(ArgumentError, "['b']", "Sharded(", "is_leaf=", "partition.place(strategy"):
        PLAIN[name](_place(source), plain)


def test_trees_that_are_cut_in_other_ways_are_a_named_error() -> None:
    other = partition.place(
        _strategy(), EVEN, [("w", partition.Shard(1, pad=True)), ("b", partition.Replicate())]
    )
    with refused(ArgumentError, "['w']", "cut along dim 0", "cut along dim 1"):
        jax.tree.map(jnp.add, {"w": _place(EVEN)["w"]}, {"w": other["w"]})


def test_other_differences_of_trees_stay_errors_of_jax() -> None:
    placed = _place(EVEN)
    with pytest.raises(ValueError, match="different") as error:
        jax.tree.map(jnp.add, placed, {"w": placed["w"]})
    assert not isinstance(error.value, JaxdistError)
    with pytest.raises(ValueError, match="different types"):
        jax.tree.map(jnp.add, {"a": (1, 2)}, {"a": [1, 2]})


@pytest.mark.parametrize("source", [EVEN, PADDED], ids=["even", "padded"])
def test_trees_of_equal_pieces_work_in_functions_of_jax(source: Any) -> None:
    placed = _place(source)
    double = {name: 2 * array for name, array in source.items()}
    _check(jax.tree.map(jnp.add, placed, placed), double)
    _check(jax.tree.map(jnp.add, placed, source, is_leaf=_is_sharded), double)
    _check(jax.tree.map(jnp.add, source, placed), double)
    doubled = jax.jit(
        lambda x: jax.tree.map(lambda a: a * 2, x),
        out_shardings=jax.tree.map(lambda x: x.sharding, placed),
    )
    _check(doubled(placed), double)


def test_shardings_of_pieces_lay_out_plain_arrays() -> None:
    placed = _place(EVEN)
    made = jax.jit(lambda x: x, out_shardings=_shardings(placed))(EVEN)
    _check(made, EVEN)
    assert made["w"].sharding == placed["w"].sharding
    _check(jax.device_put(EVEN, _shardings(placed)), EVEN)


@pytest.mark.parametrize("source", [EVEN, PADDED], ids=["even", "padded"])
def test_orbax_refuses_pieces_and_takes_whole_arrays(source: Any, tmp_path: pathlib.Path) -> None:
    placed = _place(source)
    with ocp.StandardCheckpointer() as checkpointer:
        with refused(UnsupportedError, "training.Checkpoints", "partition.place"):
            checkpointer.save(tmp_path / "pieces", placed)
        checkpointer.save(tmp_path / "whole", _whole(placed))
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "whole", _whole(placed))
    _check(partition.place(_strategy(), back, RULES), source)


@pytest.mark.parametrize("source", [EVEN, PADDED], ids=["even", "padded"])
def test_numpy_saves_pieces_as_whole_arrays(source: Any, tmp_path: pathlib.Path) -> None:
    placed = _place(source)
    np.savez(tmp_path / "x.npz", **placed)
    with np.load(tmp_path / "x.npz") as saved:
        _check(partition.place(_strategy(), dict(saved), RULES), source)
    # `safetensors.numpy` looks for it.
    with refused(MissingNameError, "'ctypes'", "np.asarray(value)"):
        print(placed["w"].ctypes)
