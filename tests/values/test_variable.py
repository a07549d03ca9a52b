"""Variables outside steps: making, reading, assigning."""

import copy
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import (
    PerReplica,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    ReplicaValueError,
    ShapeError,
)

ON_READ = VariableSynchronization.ON_READ
ON_WRITE = VariableSynchronization.ON_WRITE
NONE, SUM, MEAN, FIRST = VariableAggregation


def _two() -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _made(initial_value: Any = 10.0, **options: Any) -> Variable:
    with _two().scope():
        return Variable(initial_value, name="w", **options)


def _copies(variable: Variable) -> list[Any]:
    return [np.asarray(v).tolist() for v in variable.values]


# Making


def test_a_variable_lies_on_every_device_of_its_strategy(strategy: jaxdist.Strategy) -> None:
    with strategy.scope():
        v = Variable(np.arange(6.0, dtype=np.float32).reshape(2, 3))

    assert v.value().is_fully_replicated
    if strategy.num_replicas_in_sync > 1:
        assert v.value().sharding.device_set == set(strategy.mesh.devices.ravel())
    assert len(v.values) == len(strategy.layout.local_replicas)
    for replica in v.values:
        np.testing.assert_array_equal(replica, np.arange(6.0).reshape(2, 3))


def test_a_variable_belongs_to_the_ambient_strategy() -> None:
    strategy = _two()
    jaxdist.experimental_set_strategy(strategy)
    try:
        v = Variable(1.0)
    finally:
        jaxdist.experimental_set_strategy(None)

    assert v.distribute_strategy is strategy
    assert len(v.values) == 2


def test_the_initial_value_function_is_called_once() -> None:
    calls = []

    def initial() -> np.ndarray:
        calls.append(1)
        return np.random.default_rng().normal(size=3)

    v = _made(initial)

    assert len(calls) == 1
    assert _copies(v)[0] == _copies(v)[1]


@pytest.mark.parametrize(
    ("synchronization", "given", "expected"),
    [
        (VariableSynchronization.AUTO, None, True),
        (ON_WRITE, None, True),
        (ON_READ, None, False),
        (ON_READ, True, True),
        (ON_WRITE, False, False),
    ],
)
def test_on_read_variables_are_not_trainable_unless_asked(
    synchronization: VariableSynchronization, given: bool | None, expected: bool
) -> None:
    assert _made(synchronization=synchronization, trainable=given).trainable is expected


def test_facts_of_a_variable_are_those_it_was_made_with() -> None:
    v = _made([1, 2], dtype="float32", shape=(2,), synchronization=ON_READ, aggregation=SUM)

    assert v.name == "w:0"
    assert (v.dtype, v.shape, v.ndim, v.size, len(v)) == (np.float32, (2,), 1, 2, 2)
    assert (v.synchronization, v.aggregation) == (ON_READ, SUM)
    assert isinstance(v, jaxdist.DistributedValues)


def test_a_python_number_does_not_make_a_weakly_typed_variable() -> None:
    v = Variable(2.0)

    assert (v.value() + jnp.ones((), "bfloat16")).dtype == np.float32


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"initial_value": None}, ArgumentError, "initial_value"),
        ({"synchronization": VariableSynchronization.NONE}, ArgumentError, "NONE"),
        ({"synchronization": "bogus"}, ArgumentError, "bogus"),
        ({"aggregation": "bogus"}, ArgumentError, "bogus"),
        ({"aggregation": jaxdist.ReduceOp.SUM}, ArgumentError, "ReduceOp"),
        ({"initial_value": 1, "aggregation": MEAN}, ArgumentError, "int32"),
        ({"initial_value": True, "aggregation": SUM}, ArgumentError, "bool"),
        ({"initial_value": [1.0], "shape": (2,)}, ShapeError, r"\[2\]"),
        ({"initial_value": [1.0], "shape": (None,)}, ArgumentError, "None"),
        ({"initial_value": PerReplica([1.0, 2.0])}, ArgumentTypeError, "PerReplica"),
    ],
)
def test_a_variable_that_cannot_be_made_is_an_error_with_its_name(
    options: dict[str, Any], kind: type[Exception], what: str
) -> None:
    with pytest.raises(kind, match=what) as caught:
        _made(**{"initial_value": 1.0, **options})
    assert "'w'" in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_synchronization_none_is_for_variables_outside_every_strategy() -> None:
    assert float(Variable(1.0, synchronization=VariableSynchronization.NONE)) == 1.0


def test_a_traced_initial_value_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="traced"):
        jax.jit(lambda x: Variable(x).value())(1.0)


# Reading


def test_arithmetic_is_that_of_the_value() -> None:
    v, x = _made([1.0, 4.0]), np.array([1.0, 4.0], np.float32)

    for ours, numpys in [
        (v + 1, x + 1),
        (1 - v, 1 - x),
        (v * v, x * x),
        (2 / v, 2 / x),
        (v**2, x**2),
        (-v, -x),
        (v @ v, x @ x),
        (v == 1.0, x == 1.0),
        (v < v, x < x),
        (v[1], x[1]),
        (jnp.asarray(v), x),
        (np.asarray(v), x),
        (v.numpy(), x),
        (np.stack(list(v)), x),
    ]:
        np.testing.assert_array_equal(ours, numpys)
    assert float(v[1]) == 4.0
    assert int(Variable(3)) == 3
    assert range(5)[Variable(3)] == 3
    assert not Variable(0.0)


def test_a_variable_is_no_key_and_its_ref_is() -> None:
    v, other = Variable(1.0), Variable(1.0)

    with pytest.raises(TypeError):
        hash(v)
    assert v.ref() == v.ref() != other.ref()
    assert {v.ref(): 1, other.ref(): 2}[v.ref()] == 1
    assert v.ref().deref() is v


def test_a_copy_has_the_same_modes_and_storage_of_its_own() -> None:
    v = _made(synchronization=ON_READ, aggregation=SUM)

    other = copy.deepcopy({"v": v})["v"]
    other.assign(2.0)

    assert (other.name, other.synchronization, other.aggregation) == ("w:0", ON_READ, SUM)
    assert other.distribute_strategy is v.distribute_strategy
    assert (float(v), float(other)) == (20.0, 2.0)


def test_reading_in_a_plain_jit_is_an_error_that_says_why() -> None:
    v = _made()

    with pytest.raises(ContextError, match="would keep the value"):
        jax.jit(lambda x: x + v)(1.0)
    with pytest.raises(ContextError, match="'w'"):
        jax.jit(lambda x: v.assign(x))(1.0)
    assert float(v) == 10.0


def test_a_variable_can_be_read_and_not_assigned_under_an_eager_gradient() -> None:
    v = _made(3.0)

    assert float(jax.grad(lambda x: x * v)(2.0)) == 3.0
    with pytest.raises(ContextError, match="traced value"):
        jax.grad(lambda x: v.assign(x))(2.0)
    assert float(v) == 3.0


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(SUM, [4.0, 8.0]), (MEAN, [2.0, 4.0]), (FIRST, [1.0, 3.0])]
)
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_an_on_read_variable_reads_as_its_aggregation_says(
    aggregation: VariableAggregation, expected: list[float], shape: tuple[int, ...]
) -> None:
    v = _made(np.zeros(shape, np.float32), synchronization=ON_READ, aggregation=aggregation)
    rows = [np.array([1.0, 3.0]).reshape(shape), np.array([3.0, 5.0]).reshape(shape)]

    v.assign(PerReplica(jnp.asarray(r, "float32") for r in rows))

    np.testing.assert_array_equal(v.read_value(), np.reshape(expected, shape))
    np.testing.assert_array_equal(v.values[1], rows[1])


def test_an_on_read_variable_without_aggregation_cannot_be_read_across_replicas() -> None:
    v = _made(synchronization=ON_READ)

    with pytest.raises(ValueError, match=r"variable\.values"):
        v.read_value()
    assert _copies(v) == [10.0, 10.0]


# Assigning


@pytest.mark.parametrize("aggregation", list(VariableAggregation))
@pytest.mark.parametrize(
    ("call", "expected"), [("assign", 2.0), ("assign_add", 12.0), ("assign_sub", 8.0)]
)
def test_a_mirrored_variable_takes_one_value_whatever_its_aggregation(
    aggregation: VariableAggregation, call: str, expected: float
) -> None:
    v = _made(aggregation=aggregation)

    returned = getattr(v, call)(2.0)

    assert float(returned) == expected
    assert _copies(v) == [expected, expected]
    assert getattr(v, call)(2.0, read_value=False) is None


@pytest.mark.parametrize(("aggregation", "one"), [(SUM, 4.0), (MEAN, 2.0), (FIRST, 1.0)])
def test_a_mirrored_variable_combines_a_per_replica_value(
    aggregation: VariableAggregation, one: float
) -> None:
    v = _made(aggregation=aggregation)

    v.assign(PerReplica([1.0, 3.0]))
    assert _copies(v) == [one, one]
    v.assign_add(PerReplica([1.0, 3.0]))
    assert _copies(v) == [2 * one, 2 * one]


def test_a_mirrored_variable_without_aggregation_refuses_a_per_replica_value() -> None:
    v = _made()

    for call in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ReplicaValueError, match=r"'w'\.\w+ is a PerReplica of 2 values"):
            call(PerReplica([1.0, 3.0]))
    assert _copies(v) == [10.0, 10.0]


@pytest.mark.parametrize(
    ("aggregation", "assigned", "added"),
    [(SUM, [1.0, 1.0], None), (MEAN, [2.0, 2.0], [4.0, 4.0]), (FIRST, [2.0, 2.0], [4.0, 4.0])],
)
def test_an_on_read_variable_takes_one_value(
    aggregation: VariableAggregation, assigned: list[float], added: list[float] | None
) -> None:
    v = _made(synchronization=ON_READ, aggregation=aggregation)

    assert float(v.assign(2.0)) == 2.0
    assert _copies(v) == assigned
    if added is None:
        for call in (v.assign_add, v.assign_sub):
            with pytest.raises(ValueError, match="sum of a value on each replica"):
                call(2.0)
        assert _copies(v) == assigned
    else:
        assert float(v.assign_add(2.0)) == 4.0
        assert _copies(v) == added


def test_an_on_read_variable_without_aggregation_is_assigned_only_without_reading() -> None:
    v = _made(synchronization=ON_READ)

    with pytest.raises(ValueError, match="NONE"):
        v.assign(2.0)
    assert _copies(v) == [10.0, 10.0]
    assert v.assign(2.0, read_value=False) is None
    assert _copies(v) == [2.0, 2.0]


def test_an_integer_total_is_never_lost_when_it_is_divided() -> None:
    v = _made(0, synchronization=ON_READ, aggregation=SUM)

    for total in (3, 7, 8, -3):
        assert int(v.assign(total)) == total
    assert _copies(v) == [-1, -2]


@pytest.mark.parametrize(
    ("value", "kind", "what"),
    [
        ([1.0, 2.0], ShapeError, r"\[2\], and what it changes is float32\[\]"),
        (1j, ArgumentTypeError, "complex64"),
        (True, ArgumentTypeError, "bool"),
        ("x", ArgumentTypeError, "str"),
        (PerReplica([np.array([1.0]), np.array([2.0])]), ShapeError, r"\[1\]"),
    ],
)
@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_a_value_that_does_not_fit_is_refused_and_nothing_changes(
    synchronization: VariableSynchronization, value: Any, kind: type[Exception], what: str
) -> None:
    v = _made(synchronization=synchronization, aggregation=SUM)

    for call in (v.assign, v.assign_add):
        with pytest.raises(kind, match=what) as caught:
            call(value)
        assert "'w'" in str(caught.value)
    assert _copies(v) == [10.0, 10.0]


def test_values_are_cast_to_the_dtype_of_the_variable() -> None:
    v = _made([1.0, 2.0], dtype="bfloat16")

    v.assign(np.array([3, 4]))
    v.assign_add(jnp.array([0.5, 0.5], "float32"))

    assert v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(v.numpy().astype(np.float32), [3.5, 4.5])
    with pytest.raises(ArgumentTypeError, match="int32"):
        _made(1).assign(1.5)


def test_one_variable_is_assigned_to_another() -> None:
    v, other = _made(), _made(4.0, synchronization=ON_READ, aggregation=SUM)

    v.assign(other)

    assert float(v) == 8.0


def test_a_per_replica_value_for_a_variable_of_no_strategy_is_refused() -> None:
    with pytest.raises(ReplicaValueError, match="no strategy"):
        Variable(1.0).assign(PerReplica([1.0]))


# Checkpoints

_MODES = list(itertools.product([ON_WRITE, ON_READ], [SUM, MEAN, FIRST]))


@pytest.mark.parametrize(("synchronization", "aggregation"), _MODES)
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_saved_is_restored_under_another_number_of_replicas(
    synchronization: VariableSynchronization, aggregation: VariableAggregation, count: int
) -> None:
    options: dict[str, Any] = {"synchronization": synchronization, "aggregation": aggregation}
    saved_from = {"w": _made([1.0, 2.0], **options), "n": Variable(5)}
    if synchronization is ON_READ:
        rows = [jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])]
        saved_from["w"].assign(PerReplica(rows))
    with jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)]).scope():
        restored = {"w": Variable([0.0, 0.0], **options), "n": Variable(0)}

    saved = jax.tree.map(np.asarray, saved_from)
    jax.tree.map(Variable.assign, restored, saved, is_leaf=lambda x: isinstance(x, Variable))

    np.testing.assert_allclose(restored["w"].numpy(), saved["w"], rtol=1e-6)
    assert int(restored["n"]) == 5


# With the rest of a strategy


def test_reduce_and_gather_take_the_copies_of_a_variable() -> None:
    strategy = _two()
    with strategy.scope():
        mirrored = Variable([1.0, 2.0])
        own = Variable([0.0, 0.0], synchronization=ON_READ, aggregation=SUM)
    own.assign(PerReplica([jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]))

    assert strategy.reduce("SUM", own, axis=None).tolist() == [4.0, 6.0]
    assert strategy.reduce("MEAN", {"a": own}, axis=None)["a"].tolist() == [2.0, 3.0]
    assert strategy.reduce("SUM", mirrored, axis=None).tolist() == [2.0, 4.0]
    assert strategy.gather(own, axis=0).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert strategy.gather(mirrored, axis=0).tolist() == [1.0, 2.0, 1.0, 2.0]
    local = strategy.experimental_local_results(own)
    assert [x.tolist() for x in local] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("deterministic", [False, 8])
def test_copies_of_a_variable_are_those_of_the_replicas_on_any_number_of_devices(
    num_devices: int, shape: tuple[int, ...], deterministic: bool | int
) -> None:
    devices = [f"cpu:{i}" for i in range(num_devices)]
    strategy = jaxdist.MirroredStrategy(devices, deterministic=deterministic)
    with strategy.scope():
        own = Variable(np.zeros(shape, np.float32), synchronization=ON_READ, aggregation=SUM)
    strategy.run(
        lambda: own.assign_add(_count_up(shape, get_replica_context().replica_id_in_sync_group))
    )
    rows = [np.asarray(_count_up(shape, r)) for r in range(strategy.num_replicas_in_sync)]

    for local in (strategy.experimental_local_results(own), strategy.unwrap(own)):
        np.testing.assert_array_equal(np.stack(local), np.stack(rows))
    np.testing.assert_array_equal(np.stack(own.values), np.stack(rows))
    np.testing.assert_array_equal(strategy.reduce("SUM", own, axis=None), np.sum(rows, 0))
    for axis in range(len(shape)):
        gathered = strategy.gather(own, axis=axis)
        np.testing.assert_array_equal(gathered, np.concatenate(rows, axis))
        total = strategy.reduce("SUM", own, axis=axis)
        np.testing.assert_array_equal(total, np.sum(rows, 0).sum(axis))


def _count_up(shape: tuple[int, ...], replica: Any) -> jax.Array:
    """Different numbers for each element and replica."""
    size = int(np.prod(shape))
    return jnp.arange(size, dtype=jnp.float32).reshape(shape) + 100 * replica


def test_a_variable_keeps_its_own_split_over_logical_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    spec = jax.sharding.PartitionSpec(None, "model")
    split = jax.sharding.NamedSharding(strategy.mesh, spec)
    with strategy.scope():
        v = Variable(jax.device_put(np.ones((2, 4), np.float32), split))

    v.assign_add(np.ones((2, 4), np.float32))

    assert v.value().sharding.is_equivalent_to(split, 2)
    np.testing.assert_array_equal(v.numpy(), np.full((2, 4), 2.0))


def test_repr_shows_name_dtype_shape_and_values() -> None:
    assert repr(_made()) == "<Variable 'w:0' float32[] array(10., dtype=float32)>"
    assert "PerReplica(10.0, 10.0)" in repr(_made(synchronization=ON_READ))
