"""Processes try the connections of gloo when they join."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist._called import called
from jaxdist._processes import LocalStore, Machine, Process, find_own_address, is_chosen
from jaxdist._processes.joining import pairs
from jaxdist._processes.joining.claims import Answers
from jaxdist.errors import ClusterError
from tests.strategies.oracle import refused


@given(st.integers(2, 3000), st.data())
def test_at_most_16_partners_which_have_each_other_as_partner(count: int, data: Any) -> None:
    index = data.draw(st.integers(0, count - 1))
    partners = pairs.list_partners(index, count)
    # The two neighbours at half of the way round are one process.
    assert len(partners) in (min(16, count - 1), 15)
    assert index not in partners
    assert all(index in pairs.list_partners(other, count) for other in partners)
    # All processes are connected through their neighbours.
    assert (index + 1) % count in partners


def _run(count: int, seconds: float = 10.0, missing: int | None = None) -> list[str]:
    """Try the pairs of processes that are threads here, and return what each raised."""
    store = LocalStore()

    @called("Strategy")
    def run(index: int) -> str:
        try:
            pairs.try_pairs("127.0.0.1", Process(index, count), store, seconds)
        except ClusterError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, [i for i in range(count) if i != missing]))


@pytest.mark.parametrize("count", [2, 3, 20])
def test_all_pairs_of_one_machine_connect_and_no_thread_stays(count: int) -> None:
    before = threading.active_count()
    assert _run(count) == [""] * count
    assert threading.active_count() == before


@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_does_not_come_is_an_error_of_all_others(missing: int) -> None:
    pairs_seconds = pairs._SECONDS_FOR_RESULT
    pairs._SECONDS_FOR_RESULT = 1.0
    try:
        texts = _run(3, 1.0, missing)
    finally:
        pairs._SECONDS_FOR_RESULT = pairs_seconds
    wanted = "process 0 did not collect" if missing == 0 else "process 1 did not come"
    assert all(wanted in text for text in texts), texts


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ({"index": 7, "host": "h7"}, "process 7 on h7 answers there"),
        (None, "connection refused"),
    ],
)
@called("Strategy")
def test_an_address_at_which_someone_else_answers_is_named(
    answer: dict[str, Any] | None, part: str
) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    where = f"127.0.0.1:{server.getsockname()[1]}"
    close: Callable[[], None] = server.close
    if answer is not None:
        close = Answers(server, answer).close
    else:
        server.close()
    store = LocalStore()
    said = {"index": 1, "host": "h1", "address": "127.0.0.1", "where": where}
    store.set("jaxdist/pairs/1", json.dumps(said))
    store.set("jaxdist/pairs/failed/1", "[]")
    try:
        with refused(ClusterError, part, f"process 1 on h1 at {where}", "any free port"):
            pairs.try_pairs("127.0.0.1", Process(0, 2), store, 5.0)
    finally:
        close()


class _Machine(Machine):
    def __init__(self, names: dict[str, tuple[str, ...]], own: set[str], source: str | None):
        self.names, self.own, self.source = names, own, source

    def find_addresses(self, host: str) -> tuple[str, ...]:
        return self.names.get(host, (host,) if host[0].isdigit() or ":" in host else ())

    def is_own(self, host: str) -> bool:
        return host in self.own

    def find_source(self, host: str) -> str | None:
        return self.source if self.find_addresses(host) else None


@pytest.mark.parametrize(
    ("addresses", "own", "found"),
    [
        (["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1"}, "10.0.0.1"),
        # Behind a proxy.
        (["10.9.9.9:1", "10.0.0.2:1"], {"10.0.0.1"}, "10.0.0.7"),
        # A name that is loopback here.
        (["debian:1", "10.0.0.2:1"], {"127.0.1.1"}, "10.0.0.7"),
        (["both:1", "10.0.0.2:1"], {"10.0.0.1", "fd00::1"}, "10.0.0.1"),
        (["both:1", "[fd00::2]:1"], {"10.0.0.1", "fd00::1"}, "fd00::1"),
        (["both:1", "10.0.0.2:1"], {"fd00::1"}, "fd00::1"),
        (["127.0.0.1:1", "127.0.0.1:2"], {"127.0.0.1"}, "127.0.0.1"),
        (["localhost:1", "127.0.0.1:2"], {"127.0.0.1", "::1"}, "127.0.0.1"),
        (["[::1]:1", "[::1]:2"], {"::1"}, "::1"),
        # Nobody is known.
        (["nobody:1", "no-one:1"], set[str](), None),
        (["debian:1", "debian:2"], {"127.0.1.1"}, "10.0.0.7"),
    ],
)
def test_the_own_address(addresses: list[str], own: set[str], found: str | None) -> None:
    names: dict[str, tuple[str, ...]] = {
        "debian": ("127.0.1.1",),
        "both": ("fd00::1", "10.0.0.1"),
        "localhost": ("::1", "127.0.0.1"),
    }
    chosen = find_own_address(addresses, 0, machine=_Machine(names, own, "10.0.0.7"))
    assert (chosen and chosen.address) == found


def test_a_source_that_is_loopback_or_unknown_is_no_own_address() -> None:
    for source in (None, "127.0.0.1"):
        machine = _Machine({"debian": ("127.0.1.1",)}, {"127.0.1.1"}, source)
        assert find_own_address(["debian:1", "10.0.0.2:1"], 0, machine=machine) is None


def test_this_machine_knows_its_interfaces_and_sources() -> None:
    machine = Machine()
    assert machine.find_interface("127.0.0.1") == "lo"
    assert machine.find_interface("192.0.2.1") is None
    assert machine.find_source("127.0.0.1") == "127.0.0.1"
    assert machine.find_source("no.such.host.invalid") is None
    assert machine.has_gpus() in (True, False)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("eth0", True),
        ("eth", True),
        ("ib,eth", True),
        ("ib", False),
        ("=eth0", True),
        ("=eth", False),
        ("=ib0,eth0", True),
        ("^docker,lo", True),
        ("^eth", False),
        ("^=eth", True),
        ("^=eth0", False),
        ("eth0:1", True),
    ],
)
def test_what_nccl_reads_from_its_variable(choice: str, chosen: bool) -> None:
    assert is_chosen("eth0", choice) == chosen


@called("Strategy")
def test_an_address_of_another_machine_is_named() -> None:
    # An address for documentation, which no machine has.
    with refused(ClusterError, "process 0 cannot listen at 192.0.2.1", "jaxdist resolve"):
        pairs.try_pairs("192.0.2.1", Process(0, 2), LocalStore(), 1.0)
