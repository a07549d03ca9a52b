"""`PerReplica`: one value for each replica."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import DistributedValues, MirroredStrategy, PerReplica, Strategy
from jaxdist.errors import ArgumentTypeError, ReplicaValueError
from tests.strategies.oracle import of_this_process, refused, split


def _kind(value: Any) -> str:
    return type(value).__name__


def _id() -> jax.Array:
    return jaxdist.get_replica_context().replica_id_in_sync_group


def test_a_per_replica_is_a_distributed_value() -> None:
    assert isinstance(PerReplica([1, 2]), DistributedValues)
    assert not isinstance(jnp.ones(2), DistributedValues)


@pytest.mark.parametrize("values", [[1, 2], (1, 2), range(1, 3), iter([1, 2])], ids=_kind)
def test_values_are_those_given_in_order(values: Any) -> None:
    assert PerReplica(values).values == (1, 2)


def test_values_held_one_by_one_are_the_same_objects_and_may_be_anything() -> None:
    given = [jnp.ones(2), "text", None, object()]
    held = PerReplica(given)
    assert not held.is_global
    assert all(a is b for a, b in zip(held.values, given, strict=True))


@pytest.mark.a_device_for_each
def test_values_are_the_shards_of_the_devices_in_replica_order(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.arange(count * 6, dtype=np.float32).reshape(count * 2, 3)
    value = PerReplica.of_global(split(strategy, rows))
    assert value.is_global
    here = of_this_process(strategy, range(count))
    parts = np.split(rows, count)
    for r, have in zip(here, value.values, strict=True):
        np.testing.assert_array_equal(have, parts[r])
        assert have.devices() <= set(strategy.layout.device_grid[r])


def test_local_scalars_are_one_global_row_each() -> None:
    value = MirroredStrategy().run(_id)
    assert value.array.shape == (8,)
    assert [(v.shape, int(v)) for v in value.values] == [((), r) for r in range(8)]


def test_local_rows_are_global_rows_one_after_the_other() -> None:
    value = MirroredStrategy().run(lambda: jnp.full((2, 3), _id()))
    assert value.array.shape == (16, 3)
    assert value.values[5].tolist() == [[5] * 3] * 2


def test_the_array_of_values_held_one_by_one_is_refused_with_the_remedy() -> None:
    with refused(ReplicaValueError, "PerReplica(1, 2)", ".values", "strategy.gather"):
        _ = PerReplica([1, 2]).array


@pytest.mark.parametrize("values", [[], (), iter([])], ids=_kind)
def test_no_values_are_refused(values: Any) -> None:
    with refused(ReplicaValueError, "which is empty", "one value for each replica"):
        PerReplica(values)


@pytest.mark.parametrize("values", [3, None, "ab", b"ab", {"a": 1}], ids=repr)
def test_what_is_no_sequence_is_refused_with_the_way_to_split_an_array(values: Any) -> None:
    with refused(ArgumentTypeError, type(values).__name__, "per_replica_sharding"):
        PerReplica(values)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "sub": lambda v: v - 1,
    "rsub": lambda v: 1 - v,
    "mul": lambda v: v * 2,
    "rmul": lambda v: 2 * v,
    "div": lambda v: v / 2,
    "rdiv": lambda v: 2 / v,
    "matmul": lambda v: v @ v,
    "pow": lambda v: v**2,
    "neg": operator.neg,
    "float": float,
    "int": int,
    "bool": bool,
    "index": operator.index,
    "item": lambda v: v[0],
    "iter": list,
    "numpy": np.asarray,
    "abs": abs,
    "less": lambda v: v < 1,
    "rpow": lambda v: 2**v,
    "floordiv": lambda v: v // 2,
    "mod": lambda v: v % 2,
    "pos": operator.pos,
    "len": len,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_outside_a_replica_is_refused(name: str) -> None:
    for value in (PerReplica([1, 2]), MirroredStrategy(["cpu:0", "cpu:1"]).run(_id)):
        with pytest.raises(TypeError):
            OPERATIONS[name](value)


@pytest.mark.parametrize("name", ["add", "rmul", "float", "bool", "item", "iter", "numpy"])
def test_refused_arithmetic_says_what_to_do(name: str) -> None:
    with refused(
        ArgumentTypeError,
        "one value for each replica",
        "strategy.run(fn, args=(value,))",
        "strategy.reduce",
        "strategy.gather",
    ):
        OPERATIONS[name](PerReplica([1, 2]))


def test_a_per_replica_is_refused_by_jax_numpy() -> None:
    with pytest.raises(TypeError):
        jnp.sum(PerReplica([1, 2]))  # type: ignore[arg-type]


# As a pytree


@pytest.mark.parametrize("form", ["held", "rows", "scalars"])
def test_a_per_replica_is_a_pytree_node_that_is_put_together_again(form: str) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    value = {
        "held": PerReplica([np.ones(1), np.ones(2)]),
        "rows": strategy.run(lambda: _id()[None]),
        "scalars": strategy.run(_id),
    }[form]
    leaves, treedef = jax.tree.flatten({"x": value})
    assert len(leaves) == (2 if form == "held" else 1)
    again = jax.tree.unflatten(treedef, leaves)["x"]
    assert isinstance(again, PerReplica)
    assert again.form is value.form
    assert [np.asarray(v).tolist() for v in again.values] == [
        np.asarray(v).tolist() for v in value.values
    ]
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert [np.asarray(v).tolist() for v in doubled.values] == [
        (np.asarray(v) * 2).tolist() for v in value.values
    ]


def test_the_paths_of_its_leaves_can_be_read() -> None:
    held = jax.tree_util.tree_flatten_with_path({"x": PerReplica([1, 2])})[0]
    assert [jax.tree_util.keystr(p) for p, _ in held] == ["['x'].values[0]", "['x'].values[1]"]
    placed = MirroredStrategy().run(_id)
    assert [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(placed)[0]
    ] == [".array"]


def test_it_goes_through_a_users_jit_as_argument_and_result() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    value = strategy.run(lambda: jnp.full(2, _id()))
    got = jax.jit(lambda v: jax.tree.map(lambda x: x + 1, v))(value)
    assert isinstance(got, PerReplica)
    assert [v.tolist() for v in strategy.run(lambda x: x * 10, (got,)).values] == [
        [10, 10],
        [20, 20],
    ]


def test_a_copy_on_the_host_goes_into_a_step_a_reduction_and_a_gather_again() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    value = jax.device_get(strategy.run(lambda: jnp.full(2, _id() + 1.0)))
    assert isinstance(value, PerReplica)
    assert [v.tolist() for v in strategy.run(lambda x: x * 2, (value,)).values] == [[2, 2], [4, 4]]
    assert strategy.reduce("SUM", value, axis=None).tolist() == [3, 3]
    assert float(strategy.reduce("MEAN", value, axis=0)) == 1.5
    assert strategy.gather(value, axis=0).tolist() == [1, 1, 2, 2]


def test_values_of_a_copy_on_the_host_are_refused_with_the_remedy() -> None:
    value = jax.device_get(MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda: jnp.full(2, _id())))
    with refused(ReplicaValueError, "ndarray", "strategy.run"):
        _ = value.values


def test_a_per_replica_of_objects_is_no_argument_of_a_jitted_function() -> None:
    with pytest.raises(TypeError):
        jax.jit(lambda v: v)(PerReplica(["a", object()]))


# What it looks like


def test_the_repr_shows_the_values() -> None:
    assert repr(PerReplica([1, "a"])) == "PerReplica(1, 'a')"
    assert repr(MirroredStrategy(["cpu:0", "cpu:1"]).run(_id)) == "PerReplica(0, 1)"


def test_the_repr_of_large_values_is_their_shape() -> None:
    value = MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda: jnp.full((50, 2), _id()))
    assert repr(value) == "PerReplica(2 local values of int32[50, 2])"


def test_the_repr_never_fails() -> None:
    value = MirroredStrategy(["cpu:0", "cpu:1"]).run(_id)
    shown = []
    jax.jit(lambda v: shown.append(repr(v)))(value)
    assert "scalars" in shown[0]
    value.array.delete()
    assert repr(value).startswith("PerReplica(scalars")
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)
    assert "ShapeDtypeStruct" in repr(template)
