"""`ParameterServerStrategy` of version 1: servers that do not answer."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import jaxdist
from jaxdist._parameter_server.protocol import ChangeVariables
from jaxdist._parameter_server.strategy.worker_strategy import WorkerStrategy
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import ClusterError, DeadlineExceededError, PSUnavailableError
from tests.parameter_server.strategy.version_1 import ParameterServerStrategy, make_worker
from tests.parameter_server.transport.task import poll
from tests.parameter_server.wrapping import wrap
from tests.ports import find_free_ports


def _lose(strategy: WorkerStrategy, when: Callable[[int], bool], *, is_reply: bool) -> list[int]:
    """Lose some requests to change variables, or the replies to them; return their numbers."""
    calls: list[int] = []
    [link] = strategy.storage.links

    def change(request: Any, go_on: Any) -> Any:
        calls.append(len(calls))
        lost = when(calls[-1])
        found = go_on() if is_reply or not lost else None
        if lost:
            raise PSUnavailableError("ps 0 does not answer.", [0])
        return found

    link.call = wrap(link.call, ChangeVariables, change)  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("is_reply", [False, True])
def test_a_step_whose_request_or_reply_is_lost_counts_once(is_reply: bool) -> None:
    strategy = make_worker(servers=1)
    with strategy.scope():
        v = jaxdist.Variable(0.0, name="v")
    calls = _lose(strategy, lambda n: n % 2 == 0, is_reply=is_reply)
    for n in range(5):
        strategy.run(lambda: v.assign_add(1.0))
        assert float(v) == n + 1
    assert len(calls) == 10


def test_a_step_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.3")
    strategy = make_worker(servers=1)
    with strategy.scope():
        v = jaxdist.Variable(0.0, name="v")
    calls = _lose(strategy, lambda n: True, is_reply=False)
    with pytest.raises(PSUnavailableError, match="ps 0"):
        strategy.run(lambda: v.assign_add(1.0))
    assert len(calls) > 1
    assert float(v) == 0


def _make(addresses: list[str]) -> Any:
    spec = ClusterSpec({"ps": addresses, "worker": ["127.0.0.1:1"]})
    return ParameterServerStrategy(SimpleClusterResolver(spec, task_type="worker", task_id=0))


def test_a_server_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    [port] = find_free_ports(1)
    strategy = _make([f"127.0.0.1:{port}"])
    said = rf"worker 0 waited 1 s .* ps 0 at 127\.0\.0\.1:{port} does not answer"
    with strategy.scope(), pytest.raises(DeadlineExceededError, match=said):
        jaxdist.Variable(0.0)


def test_servers_over_grpc_have_the_variables_and_their_order_counts() -> None:
    ports = find_free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    spec = ClusterSpec({"ps": addresses, "worker": ["127.0.0.1:1"]})
    servers = [jaxdist.Server(spec, "ps", n) for n in range(2)]
    strategy = _make(addresses)
    with strategy.scope():
        v, w = jaxdist.Variable(1.0, name="v"), jaxdist.Variable(2.0, name="w")
    assert float(strategy.run(lambda x: v.assign_add(x) + w.assign_add(x), (3.0,))) == 9
    assert (float(v), float(w)) == (4, 5)
    # The strategy of another process with the same script finds the same variables.
    again = _make(addresses)
    with again.scope():
        same = jaxdist.Variable(-1.0, name="v")
    assert float(same) == 4
    swapped = _make(addresses[::-1])
    with swapped.scope(), pytest.raises(ClusterError, match="ps:0"):
        jaxdist.Variable(1.0)
    for server in servers:
        server.stop()


def test_steps_that_a_server_has_lost_are_reported(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = find_free_ports(1)
    address = f"127.0.0.1:{port}"
    spec = ClusterSpec({"ps": [address], "worker": ["127.0.0.1:1"]})

    here, saved = tmp_path / "here", tmp_path / "saved"

    def start() -> jaxdist.Server:
        return jaxdist.Server(spec, "ps", 0, snapshot_directory=here, snapshot_seconds=1000)

    server = start()
    strategy = _make([address])
    with strategy.scope():
        v = jaxdist.Variable(0, name="v")

    def run(times: int) -> None:
        for _ in range(times):
            strategy.run(lambda: v.assign_add(1))

    def read_log() -> list[str]:
        return [r.getMessage() for r in caplog.records if "started again from" in r.getMessage()]

    left = 0
    for number, (before, after) in enumerate([(3, 4), (2, 1), (1, 0)]):
        run(before)
        server.snapshot()
        shutil.copytree(here, saved)
        run(after)
        # As a server that is killed: there is nothing newer than the snapshot.
        server.stop()
        shutil.rmtree(here)
        saved.rename(here)
        server = start()
        run(1)
        left += before + 1
        assert int(v) == left
        poll(lambda seen=number: len(read_log()) > seen)
    assert read_log() == [
        "ps 0 was started again from its snapshot. Lost steps of this worker: "
        f"{lost}, and {sum_of_lost} since the job began."
        for lost, sum_of_lost in [(4, 4), (1, 5), (0, 5)]
    ]
    server.stop()


def test_values_that_a_worker_assigns_outside_of_steps_and_a_server_has_lost_are_reported(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = find_free_ports(1)
    address = f"127.0.0.1:{port}"
    spec = ClusterSpec({"ps": [address], "worker": ["127.0.0.1:1"]})
    saved = tmp_path / "saved"

    def start() -> jaxdist.Server:
        folder = tmp_path / "here"
        return jaxdist.Server(spec, "ps", 0, snapshot_directory=folder, snapshot_seconds=1000)

    server = start()
    strategy = _make([address])
    with strategy.scope():
        rate = jaxdist.Variable(1.0, name="rate")
        total = jaxdist.Variable(0.0, name="total")
    strategy.run(lambda: total.assign_add(rate.value()))
    rate.assign(2.0)
    server.snapshot()
    shutil.copytree(tmp_path / "here", saved)
    rate.assign(3.0)
    rate.assign_add(4.0)
    # As a server that is killed: there is nothing newer than the snapshot.
    server.stop()
    shutil.rmtree(tmp_path / "here")
    saved.rename(tmp_path / "here")
    server = start()
    assert (float(rate), float(total)) == (2, 1)
    [link] = strategy.storage.links
    assert link.count_lost_changes() == 2
    (said,) = [r.getMessage() for r in caplog.records if "Lost changes" in r.getMessage()]
    assert "ps 0 was started again from its snapshot." in said
    assert "2, and 2 since the job began. They changed 'rate'." in said
    server.stop()
