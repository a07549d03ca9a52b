"""`Strategy.extended`: the documented lower-level view."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, Strategy, StrategyExtended
from jaxdist.errors import ArgumentError, DeviceError
from tests.strategies.oracle import assert_each, per_replica, placed, refused

pytestmark = pytest.mark.both_executors


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _rows() -> PerReplica:
    return PerReplica([np.array([1.0, 2.0]), np.array([3.0, 5.0])])


def test_the_view_is_one_object_of_the_documented_class(strategy: Strategy) -> None:
    assert isinstance(strategy.extended, StrategyExtended)
    assert strategy.extended is strategy.extended


@pytest.mark.a_device_for_each
def test_devices_are_named_in_full_and_replica_by_replica(strategy: Strategy) -> None:
    names = strategy.extended.worker_devices
    is_central = isinstance(strategy, jaxdist.experimental.CentralStorageStrategy)
    assert isinstance(names, list if is_central else tuple)
    assert is_central or names == strategy.extended.parameter_devices
    grid = strategy.layout.device_grid.ravel()
    numbers = [(d.process_index, jax.local_devices(d.process_index).index(d)) for d in grid]
    assert tuple(names) == tuple(
        f"/job:localhost/replica:0/task:{task}/device:CPU:{index}" for task, index in numbers
    )


def test_every_device_of_a_strategy_makes_the_same_strategy_again() -> None:
    first = MirroredStrategy(["cpu:3", "cpu:1"])
    again = MirroredStrategy(list(first.extended.worker_devices))
    assert again.layout.devices == first.layout.devices


def test_reduce_to_puts_the_total_on_the_named_device(two: Strategy) -> None:
    for name in ("cpu:1", "/device:CPU:5", jax.devices()[7]):
        total = two.extended.reduce_to("SUM", _rows(), name)
        np.testing.assert_allclose(total, [4, 7])
        device = jax.devices()[{"cpu:1": 1, "/device:CPU:5": 5}.get(name, 7)]  # type: ignore[call-overload]
        assert total.devices() == {device}


@pytest.mark.parametrize("kind", ["per-replica", "mirrored", "own devices"])
def test_reduce_to_a_distributed_value_is_mirrored_over_its_devices(
    strategy: Strategy, kind: str
) -> None:
    x = per_replica(strategy, lambda r: np.full(2, r + 1.0, np.float32))
    target: Any = {
        "per-replica": x,
        "mirrored": placed(strategy, np.ones(2)),
        "own devices": list(strategy.extended.worker_devices),
    }[kind]
    total = strategy.extended.reduce_to("MEAN", x, target)
    count = strategy.num_replicas_in_sync
    assert total.devices() == set(strategy.mesh.devices.flat)
    assert_each(strategy, total, [np.full(2, (count + 1) / 2)] * count)


def test_reduce_to_maps_structures(two: Strategy) -> None:
    got = two.extended.reduce_to("sum", {"a": _rows(), "b": [_rows()]}, "cpu:0")
    assert got["a"].tolist() == got["b"][0].tolist() == [4, 7]


def test_batch_reduce_to_keeps_the_order_and_each_destination(two: Strategy) -> None:
    one, two_, three = two.extended.batch_reduce_to(
        "SUM",
        [(_rows(), "cpu:1"), (PerReplica([1, 2]), _rows()), (PerReplica([5, 6]), "cpu:0")],
    )
    assert one.tolist() == [4, 7]
    assert (int(two_), int(three)) == (3, 11)
    assert one.devices() == {jax.devices()[1]}
    assert two_.devices() == set(two.mesh.devices.flat)
    assert three.devices() == {jax.devices()[0]}


def test_batch_reduce_to_of_nothing_is_nothing(two: Strategy) -> None:
    assert two.extended.batch_reduce_to("SUM", []) == []


def test_broadcast_to_mirrors_over_the_devices_of_the_destination(strategy: Strategy) -> None:
    target = per_replica(strategy, lambda r: 0)
    got = strategy.extended.broadcast_to({"x": np.ones(2, np.float32)}, target)["x"]
    assert_each(strategy, got, [np.ones(2)] * strategy.num_replicas_in_sync)
    local = strategy.experimental_local_results(got)
    assert len(local) == len(strategy.layout.local_replicas)
    last = jax.local_devices()[-1]
    on_one = strategy.extended.broadcast_to(np.ones(2), f"cpu:{len(jax.local_devices()) - 1}")
    assert on_one.devices() == {last}
    # An array that is everywhere already.
    everywhere = strategy.extended.broadcast_to(got, last)
    assert everywhere.devices() == {last}
    assert everywhere.tolist() == [1, 1]


def test_call_for_each_replica_is_run(strategy: Strategy) -> None:
    def fn(x: Any, *, y: Any) -> Any:
        return jaxdist.get_replica_context().replica_id_in_sync_group + x + y

    got = strategy.extended.call_for_each_replica(fn, args=(1,), kwargs={"y": 2})
    assert_each(strategy, got, [r + 3 for r in range(strategy.num_replicas_in_sync)])


@pytest.mark.parametrize("name", ["reduce_to", "batch_reduce_to"])
@pytest.mark.parametrize("op", ["max", None], ids=repr)
def test_an_unknown_op_is_refused_with_the_valid_ones(two: Strategy, name: str, op: Any) -> None:
    call = {
        "reduce_to": lambda: two.extended.reduce_to(op, _rows(), "cpu:0"),
        "batch_reduce_to": lambda: two.extended.batch_reduce_to(op, [(_rows(), "cpu:0")]),
    }[name]
    with refused(ArgumentError, repr(op), "a jaxdist.ReduceOp", "'MEAN'"):
        call()


CALLS = {
    "reduce_to": lambda s, d: s.extended.reduce_to("SUM", _rows(), d),
    "batch_reduce_to": lambda s, d: s.extended.batch_reduce_to("SUM", [(_rows(), d)]),
    "broadcast_to": lambda s, d: s.extended.broadcast_to(np.ones(2), d),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("destination", "error", "part"),
    [
        ("", ArgumentError, "destinations=''"),
        (None, ArgumentError, "destinations=None"),
        (3, ArgumentError, "destinations=3"),
        ([], ArgumentError, "destinations=[]"),
        ("cpu:99", DeviceError, "'cpu:99' does not exist"),
        (["cpu:0", "cpu:5"], DeviceError, "not the strategy's own devices"),
    ],
    ids=repr,
)
def test_bad_destinations_are_refused(
    two: Strategy, name: str, destination: Any, error: Any, part: str
) -> None:
    with refused(error, f"{name}" if error is not DeviceError else "", part):
        CALLS[name](two, destination)


@pytest.mark.parametrize("pairs", [None, 3, [1], [(1,)], "ab"], ids=repr)
def test_what_is_no_list_of_pairs_is_refused(two: Strategy, pairs: Any) -> None:
    with refused(ArgumentError, "batch_reduce_to", "(value, destinations)", repr(pairs)):
        two.extended.batch_reduce_to("SUM", pairs)


def test_options_and_their_older_name_are_taken_and_change_nothing(two: Strategy) -> None:
    for keyword in ("options", "experimental_hints"):
        extra: dict[str, Any] = {
            keyword: jaxdist.experimental.CommunicationOptions(timeout_seconds=1.0)
        }
        assert two.reduce("SUM", _rows(), axis=None, **extra).tolist() == [4, 7]
        assert two.gather(_rows(), axis=0, **extra).tolist() == [1, 2, 3, 5]
        assert two.extended.reduce_to("SUM", _rows(), "cpu:0", **extra).tolist() == [4, 7]
        got = two.extended.batch_reduce_to("SUM", [(_rows(), "cpu:0")], **extra)
        assert got[0].tolist() == [4, 7]


def test_both_names_of_the_options_at_once_are_refused(two: Strategy) -> None:
    both: dict[str, Any] = {"options": object(), "experimental_hints": object()}
    for call in (
        lambda: two.reduce("SUM", _rows(), axis=None, **both),
        lambda: two.gather(_rows(), axis=0, **both),
        lambda: two.extended.reduce_to("SUM", _rows(), "cpu:0", **both),
        lambda: two.extended.batch_reduce_to("SUM", [(_rows(), "cpu:0")], **both),
    ):
        with refused(ArgumentError, "both options and experimental_hints"):
            call()


def test_one_device_reduces_to_its_own_value() -> None:
    strategy = OneDeviceStrategy("cpu:2")
    total = strategy.extended.reduce_to("SUM", np.ones(2), "cpu:1")
    assert total.tolist() == [1, 1]
    assert total.devices() == {jax.devices()[1]}
