"""Collectives refuse values and destinations that do not belong to the strategy, by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import IndexedSlices, MirroredStrategy, NcclAllReduce, PerReplica
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DonationError,
    JaxdistError,
    ReplicaValueError,
)
from tests.strategies.oracle import refused

SLICES = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))
ROWS_OF_TWO = PerReplica([jnp.ones((1, 2)), jnp.ones((1, 2))])
OUTSIDE = ["cpu:2", "cpu:3"]


def two(ops: Any = None) -> MirroredStrategy:
    """Two replicas."""
    return MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)


class GathersEachValue(jaxdist.CrossDeviceOps):
    """Returns the values of the replicas as they are."""

    def gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        """Return the value that was given."""
        return per_replica_value


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "an algorithm that does not exist": (
        lambda: jaxdist.contrib.AllReduceCrossDeviceOps("ring"),
        ArgumentError,
        ("AllReduceCrossDeviceOps was given all_reduce_alg='ring'", "hierarchical_copy"),
    ),
    "broadcast of a value of each replica": (
        lambda: NcclAllReduce().broadcast({"a": PerReplica([1.0, 2.0])}, "cpu:0"),
        ArgumentError,
        ("NcclAllReduce.broadcast was given tensor['a']=", "Reduce it first"),
    ),
    "destinations outside of the strategy": (
        lambda: two().extended.broadcast_to(1.0, OUTSIDE),
        DeviceError,
        (
            "2 destinations that are not the strategy's own",
            "['cpu:2', 'cpu:3']",
            "['cpu:0', 'cpu:1']",
        ),
    ),
    "a gather of slices": (
        lambda: NcclAllReduce().gather(PerReplica([SLICES, SLICES]), "cpu:0", 0),
        ReplicaValueError,
        ("NcclAllReduce.gather", "is IndexedSlices", "slices.to_dense()"),
    ),
    "a gather that gives each replica its value": (
        lambda: two(GathersEachValue()).gather({"a": ROWS_OF_TWO}, axis=0),
        ReplicaValueError,
        ("GathersEachValue.gather_implementation returned", "value['a']", "an array of rank 2"),
    ),
    "values of all replicas as one replica's": (
        lambda: jaxdist.assume_replicated([1.0, PerReplica([1.0, 2.0])]),
        ArgumentTypeError,
        ("assume_replicated was given value=", "strategy.run(fn, args=(value,))"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_of_the_strategy_is_refused_by_name(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2


def test_rows_that_are_deleted_are_not_gathered() -> None:
    strategy = two()
    held = jax.device_put(jnp.ones(4), strategy.per_replica_sharding)
    value = PerReplica.of_global(held)
    held.delete()
    with refused(
        DonationError, "Strategy.gather was given value, whose buffer is gone: float32[4]"
    ):
        strategy.gather(value, axis=0)
