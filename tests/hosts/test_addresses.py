"""Collectives between hosts use the network of the cluster."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.hosts.hosts import Host, make_hosts, needs_hosts
from tests.hosts.programs import sum_indices
from tests.processes.job import ROOT, run_job

# Tests with hosts wait for each other.
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

_TWO_NETWORKS = ("10.77.0.{}/24", "10.78.0.{}/24")
_IPV6 = ("fd77::{}/64",)


def _run(hosts: Sequence[Host], addresses: Sequence[str], seconds: int = 30) -> list[Any]:
    outcomes = run_job(
        sum_indices,
        len(hosts),
        holders=[host.holder for host in hosts],
        addresses=addresses,
        env={"JAXDIST_JOIN_SECONDS": str(seconds)},
    )
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
    return [outcome.result for outcome in outcomes]


def _check(results: Sequence[Any], hosts: Sequence[Host], network: int) -> None:
    count = len(hosts)
    for host, result in zip(hosts, results, strict=True):
        assert result["host"] == host.name
        assert result["sum"] == count * (count + 1) / 2
        # The published addresses are those of the wanted network, and of no other.
        for other in hosts:
            for i, address in enumerate(other.addresses):
                kind = socket.AF_INET6 if ":" in address else socket.AF_INET
                packed = socket.inet_pton(kind, address)
                assert any(packed in value for value in result["gloo"]) == (i == network)


@pytest.mark.parametrize("count", [2, 3])
def test_names_that_debian_maps_to_127_0_1_1_do_not_matter(count: int) -> None:
    with make_hosts(count) as hosts:
        for host in hosts:
            others = [f"{other.address} {other.name}" for other in hosts if other != host]
            host.write_names(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others])
        _check(_run(hosts, [f"{host.name}:2222" for host in hosts]), hosts, 0)


@pytest.mark.parametrize("network", [0, 1])
def test_of_two_networks_the_one_of_the_cluster_is_used(network: int) -> None:
    with make_hosts(2, _TWO_NETWORKS) as hosts:
        _check(_run(hosts, [f"{h.addresses[network]}:2222" for h in hosts]), hosts, network)


def test_addresses_of_ipv6() -> None:
    with make_hosts(2, _IPV6) as hosts:
        _check(_run(hosts, [f"[{host.address}]:2222" for host in hosts]), hosts, 0)


def test_a_host_whose_name_has_no_address() -> None:
    with make_hosts(2) as hosts:
        for host in hosts:
            host.write_names(["127.0.0.1 localhost"])
        _check(_run(hosts, [f"{host.address}:2222" for host in hosts]), hosts, 0)


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_a_firewall_that_opens_the_ports_of_the_cluster_only_is_an_error_on_all_hosts(
    closed: tuple[int, ...],
) -> None:
    with make_hosts(2) as hosts:
        for index in closed:
            hosts[index].open_only(2222)
        results = _run(hosts, [f"{host.address}:2222" for host in hosts], seconds=5)
        if closed == (1,):
            # The host with the lower address listens, so this firewall is not in the way.
            _check(results, hosts, 0)
            return
        for result in results:
            assert result["error"] == "ClusterError"
            for part in (
                "host0",
                "host1",
                "10.77.0.1",
                "no answer to a connection",
                "any free port",
            ):
                assert part in result["message"]


def test_a_firewall_that_refuses_is_named_as_well() -> None:
    with make_hosts(2) as hosts:
        hosts[0].open_only(2222, answer="reject with tcp reset")
        for result in _run(hosts, [f"{host.address}:2222" for host in hosts], seconds=5):
            assert result["error"] == "ClusterError"
            assert "connection refused" in result["message"]


def test_nothing_is_left_when_the_process_that_made_hosts_is_killed() -> None:
    script = """
        import time
        from tests.hosts.hosts import make_hosts
        with make_hosts(2) as hosts:
            print(*[host.holder for host in hosts], flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        holders = process.stdout.readline().split()
        assert len(holders) == 2
        process.kill()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{holder}/ns/net") for holder in holders):
        assert time.monotonic() < deadline, "holders of hosts did not end"
        time.sleep(0.01)
