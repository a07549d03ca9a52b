"""Faults of the network between a real client and a real server, by a proxy."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxdist._parameter_server.transport import Message, connect
from jaxdist.errors import DeadlineExceededError, UnavailableError
from tests.parameter_server.transport.proxy import Fault, start_proxy
from tests.parameter_server.transport.task import Task, start_task
from tests.tables import sampled

SECONDS = 1.0
SIZE = 700_000
VALUES = np.arange(SIZE, dtype=np.int32)
KINDS = ("drop", "delay", "cut", "duplicate", "flip")
MOST = 45
ROWS = [
    (kind, to_server, number)
    for kind in KINDS
    for to_server in (True, False)
    for number in range(1, MOST)
]


@pytest.fixture(scope="module")
def task() -> Iterator[Task]:
    """One task for all tests of this file."""
    with start_task() as started:
        yield started


@pytest.mark.parametrize(
    "row",
    sampled(ROWS, 24, name=lambda row: f"{row[0]}-{'to' if row[1] else 'from'}-{row[2]}"),
)
def test_the_kth_piece_is_harmed(task: Task, row: tuple[str, bool, int]) -> None:
    """Small calls and large ones, both ways, and no wrong array at either end."""
    kind, to_server, number = row
    direct = connect(task.address, layer="grpc", name="ps 0")
    before = direct.call(Message("count")).fields["count"]
    right, late = 0, 0
    named: list[bool] = []
    with start_proxy(task.address, Fault(kind, number, to_server)) as proxy:
        channel = connect(proxy.address, layer="grpc", name="ps 0")
        for turn in range(4):
            began = time.monotonic()
            try:
                if turn % 2:
                    reply = channel.call(Message("pull", {"size": SIZE}), SECONDS)
                    assert np.array_equal(reply.arrays[0], VALUES)
                else:
                    sent = Message("add", {}, (VALUES, np.ones(3, np.int8)))
                    reply = channel.call(sent, SECONDS)
                    assert reply.fields == {"sums": [int(VALUES.sum(dtype=np.int64)), 3]}
                    right += 1
            except (UnavailableError, DeadlineExceededError) as error:
                named.append(proxy.address in str(error))
                late += not turn % 2
            assert time.monotonic() - began < SECONDS + 3
        began = time.monotonic()
        channel.close()
        assert time.monotonic() - began < SECONDS + 3
        assert proxy.has_happened
        assert all(named)
    after = direct.call(Message("count")).fields["count"]
    direct.close()
    # A push without a reply may have been counted, and never twice.
    assert right <= after - before <= right + late


def test_without_a_fault_all_calls_come_through(task: Task) -> None:
    with start_proxy(task.address, Fault("none", 0, True)) as proxy:
        channel = connect(proxy.address, layer="grpc", name="ps 0")
        reply = channel.call(Message("echo", {"x": 1}, (VALUES,)), 20)
        assert np.array_equal(reply.arrays[0], VALUES)
        channel.close()


def test_the_proxy_does_harm(task: Task) -> None:
    with start_proxy(task.address, Fault("cut", 4, True)) as proxy:
        channel = connect(proxy.address, layer="grpc", name="ps 0")
        with pytest.raises(UnavailableError):
            channel.call(Message("add", {}, (np.zeros(3_000_000, np.int8),)), 10)
        assert proxy.has_happened
        channel.close()


def test_a_bit_in_the_middle_of_an_array_is_found_by_the_checksum(task: Task) -> None:
    for number in range(6, 30):
        with start_proxy(task.address, Fault("flip", number, True)) as proxy:
            channel = connect(proxy.address, layer="grpc", name="ps 0")
            text = ""
            try:
                channel.call(Message("add", {}, (np.zeros(4_000_000, np.int8),)), 5)
            except (UnavailableError, DeadlineExceededError) as error:
                # A bit of gRPC's own frames may also change nothing, or end the connection.
                text = str(error)
            channel.close()
        if "the request was damaged on its way" in text:
            return
    pytest.fail("no checksum has found it")
