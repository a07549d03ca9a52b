"""Processes meet, or say why they cannot."""

import socket
import time
from typing import Any

import pytest

from jaxdist._called import called
from jaxdist._processes import LocalStore, Machine, Process
from jaxdist._processes.addresses import split_address
from jaxdist._processes.agreement import Agreement
from jaxdist._processes.joining import connection
from jaxdist._processes.joining.claims import Silence, ask, claim
from jaxdist._processes.joining.launched import get_launched_devices
from jaxdist._processes.settings import get_settings
from jaxdist.errors import (
    ArgumentError,
    ClusterError,
    ContextError,
    DeadlineExceededError,
    DuplicateTaskError,
    UnavailableError,
)
from tests.processes.job import results_of_job, run_job
from tests.processes.joining.meeting import join, use_store_after_leaving
from tests.strategies.oracle import refused


def _join(how: str, count: int = 2, **more: Any) -> list[dict[str, Any]]:
    env = {"HOW": how, "JAXDIST_JOIN_SECONDS": "4", "JAXDIST_HEARTBEAT_SECONDS": "5"}
    outcomes = run_job(join, count, env=env, timeout=120, **more)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("service", [True, False], ids=["with a launcher", "alone"])
@pytest.mark.parametrize("count", [2, 3])
def test_processes_meet_and_end_with_code_0(count: int, service: bool) -> None:
    for index, result in enumerate(_join("twice", count, service=service)):
        assert result == {"error": None, "index": index, "count": count}


def test_a_process_that_does_not_come_is_named_with_its_address() -> None:
    here, _ = _join("missing")
    assert here["error"] == "ClusterError"
    assert "process 1 at 127.0.0.1:" in here["message"]
    assert "nothing listens there" in here["message"]


def test_processes_with_different_clusters_say_so() -> None:
    results = _join("other cluster")
    assert [result["error"] for result in results] == ["ClusterError"] * 2
    assert any("have different clusters" in result["message"] for result in results)


def test_processes_with_different_versions_say_so() -> None:
    results = _join("other version")
    assert [result["error"] for result in results] == ["ClusterError"] * 2
    assert any("jax 0.0.1" in result["message"] for result in results)


def test_a_process_that_answers_with_another_index_is_named() -> None:
    here, _ = _join("says another index")
    assert here["error"] == "DuplicateTaskError"
    assert "says that it is task 5" in here["message"]


def test_two_processes_with_one_index_say_so() -> None:
    results = _join("same index", 3)
    assert "DuplicateTaskError" in {result["error"] for result in results}


@pytest.mark.parametrize(
    ("how", "error", "part"),
    [
        ("backend started", "BackendStartedError", "Move Strategy(...) to the top"),
        ("another job", "ContextError", "joins one cluster, once"),
        ("bad address", "ClusterError", "host:port"),
    ],
)
def test_a_process_that_cannot_join_says_what_to_do(how: str, error: str, part: str) -> None:
    for result in _join(how):
        assert result["error"] == error
        assert part in result["message"]


def test_ctrl_c_while_a_process_waits_for_others_frees_its_port() -> None:
    here, _ = _join("interrupted", service=False)
    assert here == {"error": "KeyboardInterrupt", "message": "its port is free again"}


def test_a_store_whose_service_has_ended_says_so_at_each_request() -> None:
    (errors,) = results_of_job(use_store_after_leaving, 1, service=False)
    assert len(errors) == 5
    for error in errors.values():
        assert error.startswith("UnavailableError: The coordination service of the job cannot")


def test_a_service_that_cannot_be_reached_is_named_and_ends_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        service = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"HOW": "", "JAXDIST_JOIN_SECONDS": "3", "JAXDIST_SERVICE": service}
    for outcome in run_job(join, 2, env=env, service=False):
        assert outcome.exit_code == 0, outcome.describe()
        assert outcome.result["error"] == "ClusterError"
        for part in (f"coordination service at {service}", "nothing listens there", "3 s"):
            assert part in outcome.result["message"]


@called("Strategy")
def test_a_port_of_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = {"cluster": "a", "index": 0, "count": 2, "pid": 1}
        with refused(ClusterError, address, "another program", "ss -ltnp"):
            claim(address, said)


@called("Strategy")
def test_a_claim_of_the_same_task_is_a_duplicate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    said = {"cluster": "a", "index": 0, "count": 2, "pid": 1, "host": "here"}
    answers = claim(address, said)
    try:
        assert ask(address) == said
        with refused(DuplicateTaskError, "are both task 0"):
            claim(address, said)
    finally:
        answers.close()
    refusal = Silence("nothing listens there (connection refused)", is_listening=False)
    assert ask(address) == refusal


_WRONG = ["host", "host:", ":80", "host:0", "host:65536", "host:x", "host:1:2", "::1:2", " h:1"]


@pytest.mark.parametrize("address", [*_WRONG, "[host]:1", "[::1:1", "http://host:1", "host/x:1"])
@called("Strategy")
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with refused(ClusterError, "host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("host:1", ("host", 1)),
        ("a-1.b_c.example.com.:65535", ("a-1.b_c.example.com.", 65535)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]:2222", ("fe80::1%eth0", 2222)),
    ],
)
@called("Strategy")
def test_an_address_has_a_host_and_a_port(address: str, found: tuple[str, int]) -> None:
    assert split_address(address) == found


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_a_time_that_is_none_is_refused_with_the_name_of_the_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_QUIET_SECONDS", text)
    with refused(ArgumentError, "JAXDIST_QUIET_SECONDS"):
        get_settings()


@pytest.mark.parametrize("text", ["0", "two"])
def test_a_number_of_devices_that_is_none_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_DEVICES_PER_PROCESS", text)
    with refused(ArgumentError, "JAXDIST_DEVICES_PER_PROCESS"):
        get_launched_devices()


def test_an_exchange_that_one_process_does_not_come_to_names_it() -> None:
    agreement = Agreement(LocalStore(), Process(0, 3))
    with refused(DeadlineExceededError, "process 1, process 2 did not take part") as caught:
        agreement.gather("rows", "8", 0.01)
    error: Any = caught.value
    assert error.processes == (1, 2)


def test_an_exchange_with_a_process_that_has_ended_names_it() -> None:
    store = LocalStore()
    store.set("jaxdist/left/1", "its program has ended")
    with refused(UnavailableError, "process 1 has ended (its program has ended)") as caught:
        Agreement(store, Process(0, 2)).gather("rows", "8", 5)
    error: Any = caught.value
    assert error.processes == (1,)


def test_an_exchange_that_nobody_needs_any_more_is_stopped() -> None:
    agreement = Agreement(LocalStore(), Process(0, 2))
    with refused(ContextError, "The exchange of rows was stopped"):
        agreement.gather("rows", "8", 20, is_stopped=lambda: True)


def test_the_limit_of_an_exchange_counts_from_when_it_is_needed() -> None:
    began = time.monotonic()
    # As a loop does that comes to its next batch later than the thread that reads ahead.
    asked: list[float] = []

    def needed_since() -> float | None:
        now = time.monotonic()
        asked.append(now)
        return began + 0.6 if now > began + 0.6 else None

    agreement = Agreement(LocalStore(), Process(0, 2))
    with refused(DeadlineExceededError, "process 1 did not take part", "within 0.2 s"):
        agreement.gather("rows", "8", 0.2, needed_since=needed_since)
    assert time.monotonic() >= began + 0.8
    assert len(asked) >= 2


def test_a_process_without_any_address_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nowhere(Machine):
        def find_addresses(self, host: str) -> tuple[str, ...]:
            return ()

    monkeypatch.setattr(connection, "Machine", Nowhere)
    with refused(
        ClusterError, "Process 0 has no address", "h0:1 is not an address of this machine"
    ):
        connection._choose_address(["h0:1", "h1:1"], 0, "")
