"""Variables in narrow dtypes and with special values: no other row and no bit changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable, VariableAggregation, get_replica_context

ONLY_FIRST, SUM = VariableAggregation.ONLY_FIRST_REPLICA, VariableAggregation.SUM
ON_READ, AUTO = jaxdist.VariableSynchronization.ON_READ, jaxdist.VariableSynchronization.AUTO


def test_a_division_of_rows_leaves_large_integers_of_other_rows() -> None:
    v = Variable(np.array([2**24 + 1, 2**31 - 1, -7], np.int32))
    v.scatter_div(IndexedSlices(np.array([2], np.int32), [2]))
    # As floats, the first two were 2**24 and 2**31.
    assert np.asarray(v).tolist() == [2**24 + 1, 2**31 - 1, -3]


def test_a_division_of_rows_leaves_infinities_of_complex_rows() -> None:
    v = Variable(np.array([complex(np.inf, 1), 4], np.complex64))
    v.scatter_div(IndexedSlices(np.array([2], np.complex64), [1]))
    assert complex(v[0]) == complex(np.inf, 1)
    assert complex(v[1]) == 2


@pytest.mark.parametrize(
    ("dtype", "before", "divisors", "expected"),
    [
        ("float16", 6e4, [1e3, 1e2], 0.6),  # The product of the divisors is infinite.
        ("int8", 100, [16, 2, 1, 2], 1),
        ("int8", 100, [16, 16], 0),  # 256 wraps around to 0.
        ("int8", -100, [3, 3], -11),
        ("uint8", 7, [0], 255),
        ("int32", 0, [0], 0),
    ],
)
def test_repeated_rows_divide_one_after_the_other(
    dtype: str, before: float, divisors: list[int], expected: float
) -> None:
    v = Variable(np.array([before, 1]).astype(dtype))
    rows = IndexedSlices(np.array(divisors).astype(dtype), [0] * len(divisors))
    v.scatter_div(rows)
    np.testing.assert_allclose(np.asarray(v).astype(float), [expected, 1], rtol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_numbers_of_batches_may_exceed_the_dtype_of_the_indices(dtype: str) -> None:
    v = Variable(np.zeros((300, 3), np.float32))
    columns = np.arange(300).reshape(300, 1) % 3
    rows = np.arange(1.0, 301.0, dtype=np.float32).reshape(300, 1)
    v.batch_scatter_update((jnp.asarray(rows), jnp.asarray(columns.astype(dtype))))
    expected = np.zeros((300, 3), np.float32)
    np.put_along_axis(expected, columns, rows, axis=1)
    np.testing.assert_array_equal(v, expected)


_SPECIAL: dict[str, Any] = {
    "float32": np.array([1, 0x80000000, 0x7FC00123, 0xFF800000], np.uint32).view(np.float32),
    "bfloat16": np.array([1, 0x8000, 0x7FC5], np.uint16).view(jnp.bfloat16),
    "float16": np.array([1, 0x8000, 0x7E05], np.uint16).view(np.float16),
    "float8_e4m3fn": np.array([1, 0x80, 0x7F], np.uint8).view(jnp.float8_e4m3fn),
    "complex64": np.array([0x80000000, 1], np.uint32).view(np.complex64),
    "bool": np.array([True, False]),
    "int8": np.array([-128, 127], np.int8),
}


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ], ids=["mirrored", "on_read"])
@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("dtype", _SPECIAL)
def test_the_value_of_the_first_replica_keeps_its_bits(
    dtype: str, eagerly: bool, synchronization: Any
) -> None:
    strategy, first = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]), _SPECIAL[dtype]
    with strategy.scope():
        v = Variable(np.zeros_like(first), aggregation=ONLY_FIRST, synchronization=synchronization)
    given = PerReplica([first, np.ones_like(first)])
    if eagerly:
        with jaxdist.config.run_eagerly():
            strategy.run(lambda x: v.assign(x), (given,))
    else:
        strategy.run(lambda x: v.assign(x), (given,))
    assert np.asarray(v.read_value()).tobytes() == first.tobytes()


def _assign_outside(v: Variable, strategy: Any, value: Any) -> None:
    v.assign(value)


def _assign_in_merge(v: Variable, strategy: Any, value: Any) -> None:
    def step(x: Any) -> Any:
        merged = lambda strategy, x: v.assign(jnp.asarray(value))  # noqa: E731
        return get_replica_context().merge_call(merged, (x,))

    strategy.run(step, (1.0,))


@pytest.mark.parametrize("assign", [_assign_outside, _assign_in_merge])
def test_the_shares_of_a_sum_fit_into_a_dtype_below_the_number_of_replicas(assign: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=256)
    value = np.array([127, -128, 1, 0], np.int8)
    with strategy.scope():
        v = Variable(np.zeros_like(value), aggregation=SUM, synchronization=ON_READ)
    assign(v, strategy, value)
    np.testing.assert_array_equal(v.read_value(), value)


@pytest.mark.parametrize("assign", [_assign_outside, _assign_in_merge])
def test_the_shares_of_an_infinite_complex_number_have_its_parts(assign: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    value = np.array([complex(np.inf, 1), complex(2, -np.inf)], np.complex64)
    with strategy.scope():
        v = Variable(np.zeros_like(value), aggregation=SUM, synchronization=ON_READ)
    assign(v, strategy, value)
    # `==`, since a comparison of arrays with tolerance ignores the other part of an infinity.
    assert np.asarray(v.read_value()).tolist() == value.tolist()


def test_a_mean_of_rows_keeps_the_parts_of_an_infinite_complex_number() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = Variable(np.zeros(2, np.complex64), aggregation=VariableAggregation.MEAN)
    rows = jax.device_put(
        np.array([complex(np.inf, 2)] * 2, np.complex64), strategy.per_replica_sharding
    )
    strategy.run(lambda x: v.scatter_add(IndexedSlices(x, jnp.zeros(1, jnp.int32))), (rows,))
    assert complex(v[0]) == complex(np.inf, 2)
