"""Replicas that should hold the same bits and do not are found, by leaf and by replica."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ArgumentError, ReplicaDriftError
from tests.strategies.oracle import refused

FOUR = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def copies(*values: Any) -> jax.Array:
    """An array that claims to be equal on all replicas, with a value of its own on each."""
    arrays = [
        jax.device_put(jnp.asarray(v), d) for v, d in zip(values, FOUR.layout.devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        arrays[0].shape, FOUR.replicated_sharding, arrays
    )


@pytest.mark.parametrize("replica", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_one_changed_element_is_found_on_each_replica(replica: int, dtype: str) -> None:
    values = [np.zeros((2, 3), dtype) for _ in range(4)]
    values[replica][1, 2] = 1
    state = {"w": copies(*values), "b": copies(*[np.ones(2, dtype)] * 4)}
    parts = "1 of 2 mirrored arrays", f"state['w']: replicas [{replica}] differ from replica 0"
    with refused(ReplicaDriftError, *parts):
        FOUR.check_replicas(state)


def test_two_swapped_elements_are_found() -> None:
    with refused(ReplicaDriftError, "replicas [2, 3] differ"):
        FOUR.check_replicas(copies([1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 1.0]))


def test_a_drifted_random_key_is_found() -> None:
    keys = [jax.random.key_data(jax.random.key(i)) for i in (0, 0, 5, 0)]
    with refused(ReplicaDriftError, "replicas [2] differ"):
        FOUR.check_replicas(jax.random.wrap_key_data(copies(*keys)))


def test_more_than_ten_drifted_arrays_are_counted() -> None:
    state = [copies(0.0, 0.0, 0.0, 1.0) for _ in range(12)]
    with refused(ReplicaDriftError, "12 of 12", "state[9]", "and 2 more") as caught:
        FOUR.check_replicas(state)
    assert "state[10]" not in str(caught.value)


def test_a_drift_is_found_at_the_first_call_and_at_every_nth_after_it() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    same, other = (copies(0.0, 0.0, 0.0, last) for last in (0.0, 1.0))
    assert strategy.check_replicas(same, every=3)
    # Calls 2 and 3 compare nothing, so the drift stays.
    assert [strategy.check_replicas(other, every=3) for _ in range(2)] == [False, False]
    with refused(ReplicaDriftError, "replicas [3] differ"):
        strategy.check_replicas(other, every=3)


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "3"])
def test_calls_between_comparisons_are_a_number_from_1_up(every: Any) -> None:
    with refused(ArgumentError, f"check_replicas was given every={every!r}", "from 1 up"):
        FOUR.check_replicas(copies(0.0, 0.0, 0.0, 0.0), every=every)


def test_what_is_not_mirrored_is_not_compared() -> None:
    rows = jax.device_put(np.arange(4.0), FOUR.per_replica_sharding)
    assert not FOUR.check_replicas({"rows": rows, "none": None, "number": 3.0})
