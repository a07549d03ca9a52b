"""Devices by name, and how many steps may be in flight."""

import threading
from typing import Any

import jax
import pytest

import jaxdist
from jaxdist import MirroredStrategy, PerReplica
from jaxdist._called import called
from jaxdist._devices import runtime
from jaxdist.errors import ArgumentTypeError, DeviceError
from tests.strategies.oracle import refused


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("cpu:0", 0),
        ("CPU:3", 3),
        ("cpu", 0),
        ("Cpu:7", 7),
        ("/cpu:2", 2),
        ("device:CPU:1", 1),
        ("/device:CPU:1", 1),
        ("/job:localhost/replica:0/task:0/device:CPU:5", 5),
        ("/job:localhost/replica:0/task:0/device:cpu:5", 5),
        ("/job:localhost/device:CPU:4", 4),
        ("/replica:0/task:0/device:CPU:6", 6),
        ("/job:localhost/task:0/CPU:2", 2),
        (" cpu:1 ", 1),
    ],
)
def test_every_documented_name_is_understood(name: str, index: int) -> None:
    assert runtime.device_from_name(name) is jax.devices()[index]


def test_a_device_stands_for_itself() -> None:
    assert runtime.device_from_name(jax.devices()[4]) is jax.devices()[4]


def test_the_full_name_of_a_device_stands_for_it() -> None:
    for device in jax.devices():
        name = runtime.device_name(device)
        assert name == f"/job:localhost/replica:0/task:0/device:CPU:{device.id}"
        assert runtime.device_from_name(name) is device


@pytest.mark.parametrize(
    "name", ["", "fpga:0", "cpu:x", "cpu:-1", "0", "cpu:0:1", "device", "/job:/cpu:0", "cpu 0"]
)
def test_a_name_that_is_not_understood_is_refused_with_the_form_and_the_devices(name: str) -> None:
    with refused(DeviceError, repr(name), "KIND:INDEX", "'cpu:0'", "'cpu:7'"):
        runtime.device_from_name(name)


def test_a_device_that_does_not_exist_is_refused_with_the_number_and_the_remedy() -> None:
    with refused(
        DeviceError, "'cpu:8' does not exist", "8 CPU device(s)", "'cpu:7'", "virtual_devices(9)"
    ):
        runtime.device_from_name("cpu:8")


@pytest.mark.parametrize("name", ["GPU:0", "cuda:1", "tpu:0"])
def test_an_accelerator_that_is_not_there_is_refused(name: str) -> None:
    with refused(DeviceError, repr(name), "does not exist", "0 ", "'cpu:0'"):
        runtime.device_from_name(name)


def test_a_device_of_another_job_is_refused() -> None:
    with refused(DeviceError, "'worker'", "'localhost'", "'cpu:0'"):
        runtime.device_from_name("/job:worker/replica:0/task:0/device:CPU:0")


@pytest.mark.parametrize("part", ["replica:1/task:0", "replica:0/task:3"])
def test_a_device_of_a_task_that_does_not_exist_is_refused(part: str) -> None:
    with refused(DeviceError, part.split("/")[0 if "replica:1" in part else 1], "'cpu:0'"):
        runtime.device_from_name(f"/job:localhost/{part}/device:CPU:0")


@pytest.mark.parametrize("name", [None, 0, 1.5, ["cpu:0"]], ids=repr)
def test_what_is_neither_name_nor_device_is_refused(name: Any) -> None:
    with refused(ArgumentTypeError, repr(name), type(name).__name__, "'cpu:0'"):
        runtime.device_from_name(name)


@called("who")
def test_names_of_one_device_are_one_device() -> None:
    with refused(DeviceError, "who", "same device twice", "cpu:1", "List each device once"):
        runtime.distinct_devices(["cpu:1", "cpu:0", jax.devices()[1]])


@called("who")
def test_distinct_devices_keep_their_order() -> None:
    got = runtime.distinct_devices(["cpu:2", jax.devices()[0], "CPU:1"])
    assert [d.id for d in got] == [2, 0, 1]


def test_devices_of_a_platform_that_is_not_there_are_none() -> None:
    assert runtime.local_devices("tpu") == []
    assert len(runtime.local_devices("cpu")) == 8
    assert runtime.default_devices() == jax.local_devices()
    assert runtime.list_device_names() == [f"cpu:{i}" for i in range(8)]


# Steps in flight


def test_every_eighth_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(int(x)))
    steps = runtime.StepsInFlight()
    for i in range(20):
        steps.make_room()
        steps.count_step({"large": jax.numpy.zeros(9), "scalar": jax.numpy.int32(i)})
    assert waited == [7, 15]


def test_a_result_that_was_given_away_is_not_waited_for() -> None:
    steps = runtime.StepsInFlight()
    given_away = jax.numpy.zeros(2)
    for _ in range(runtime.MAX_STEPS_IN_FLIGHT_ON_CPU):
        steps.count_step(given_away)
    given_away.delete()
    steps.make_room()


def _sum_step(x: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce("sum", x)


def test_a_loop_that_never_blocks_is_bounded_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    x = strategy.run(lambda x: x, (PerReplica([1.0, 2.0]),))
    waits: list[int] = []
    real = jax.block_until_ready

    def block(value: Any) -> Any:
        waits.append(1)
        return real(value)

    monkeypatch.setattr(jax, "block_until_ready", block)
    for _ in range(80):
        total = strategy.run(_sum_step, (x,))
    assert len(waits) >= 80 // runtime.MAX_STEPS_IN_FLIGHT_ON_CPU - 1
    assert float(total) == 3.0


def test_steps_of_two_threads_do_not_disturb_each_other() -> None:
    strategies = [MirroredStrategy(["cpu:0", "cpu:1"]), MirroredStrategy(["cpu:2", "cpu:3"])]
    totals: dict[int, float] = {}

    def loop(index: int) -> None:
        strategy = strategies[index]
        x = PerReplica([1.0 + index, 2.0])
        for _ in range(50):
            total = strategy.run(_sum_step, (x,))
        totals[index] = float(total)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert totals == {0: 3.0, 1: 4.0}


def test_devices_of_different_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, platform: str) -> None:
            self.platform = platform

    monkeypatch.setattr(runtime, "device_from_name", lambda n, *_: Fake(n.split(":")[0]))
    with refused(DeviceError, "different kinds", "['cpu', 'gpu']", "cpu:0", "gpu:1"):
        MirroredStrategy(["cpu:0", "gpu:1"])
