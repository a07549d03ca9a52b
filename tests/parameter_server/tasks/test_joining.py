"""Workers that join while a training runs."""

import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator, experimental_get_current_worker_index
from jaxdist.errors import (
    ArgumentError,
    ClusterError,
    ContextError,
    DeadlineExceededError,
    DeviceError,
    UnsupportedError,
)
from tests.parameter_server.tasks.cluster import Cluster, Task, make_cluster
from tests.ports import find_free_ports

SCRIPT = pathlib.Path(__file__).with_name("joining_script.py")


def _start_new_worker(cluster: Cluster, address: str | None = None) -> None:
    """Start worker 1, which the cluster of the chief does not list."""
    address = address or f"127.0.0.1:{find_free_ports(1)[0]}"
    cluster.addresses = {**cluster.addresses, "worker": [*cluster.addresses["worker"], address]}
    cluster.environment["JAXDIST_ANNOUNCE"] = "1"
    cluster.start("worker 1")


def _wait_for_line(chief: Task, text: str) -> None:
    """Wait until the chief has written a line, while it runs rounds of steps."""
    while not any(text in line for line in chief.lines):
        chief.wait_for("round")


def _start_until_worker_1_has_joined(cluster: Cluster) -> Task:
    """Start all tasks, and a worker that they do not list; return the chief, which runs rounds."""
    chief = cluster.start_all()
    chief.wait_for("first")
    _start_new_worker(cluster)
    chief.tell()
    _wait_for_line(chief, "Worker 1 has joined")
    return chief


@pytest.mark.slow
def test_a_worker_that_announces_itself_takes_part_and_each_step_counts_once() -> None:
    with make_cluster("200", script=SCRIPT, workers=1) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        _start_new_worker(cluster)
        chief.tell()
        end = chief.wait_for("end")
        assert end["count"] == end["applied"] == end["scheduled"] == end["total"], end
        assert end["ran_on"]["1"] >= 20
        assert end["lost"] == 0
        assert "Worker 1 has joined, and takes functions now." in chief.wait()
        # It ends with the chief; the job ends the workers that it lists.
        assert (
            "ends: the training that it took part in has ended" in cluster.tasks["worker 1"].wait()
        )
        assert cluster.tasks["worker 1"].process.returncode == 0
        assert cluster.tasks["worker 0"].process.poll() is None


@pytest.mark.slow
def test_a_worker_that_announced_itself_outlives_a_killed_chief_and_ends_with_the_next() -> None:
    with make_cluster("200", script=SCRIPT, workers=1) as cluster:
        chief = _start_until_worker_1_has_joined(cluster)
        chief.kill()
        # The next chief does not list it.
        cluster.addresses["worker"].pop()
        chief = cluster.start("chief 0")
        chief.wait_for("first")
        chief.tell()
        assert chief.wait_for("end")["ran_on"]["1"] >= 20
        assert "works for another coordinator from now on" in cluster.tasks["worker 1"].wait()
        assert cluster.tasks["worker 1"].process.returncode == 0


@pytest.mark.slow
def test_a_worker_that_announced_itself_ends_when_its_server_is_gone() -> None:
    with make_cluster("1", script=SCRIPT, workers=1) as cluster:
        cluster.environment["JAXDIST_JOIN_SECONDS"] = "3"
        cluster.environment["JAXDIST_ANNOUNCE"] = "1"
        cluster.start("worker 0")
        written = cluster.tasks["worker 0"].wait()
        assert cluster.tasks["worker 0"].process.returncode == 1
        server = cluster.addresses["ps"][0]
        assert f"ClusterError: The parameter server 0 at {server} has not answered for" in written


@pytest.mark.slow
def test_a_worker_that_joined_and_is_killed_comes_back_with_its_dataset() -> None:
    with make_cluster("3000", script=SCRIPT, workers=1) as cluster:
        chief = _start_until_worker_1_has_joined(cluster)
        for _ in range(2):
            cluster.tasks["worker 1"].kill()
            _wait_for_line(chief, "Worker 1 was lost")
            cluster.start("worker 1")
            _wait_for_line(chief, "Worker 1 is back")
            chief.lines.clear()
        end = chief.wait_for("end")
        assert end["count"] == end["applied"] == end["scheduled"] == end["total"], end
        assert end["lost"] == 0


@pytest.mark.slow
def test_a_worker_takes_part_by_add_worker_and_a_second_call_changes_nothing() -> None:
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    with make_cluster("100", address, script=SCRIPT, workers=1) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        chief.tell()
        # It is waited for: the worker starts after the call.
        _start_new_worker(cluster, address=address)
        assert chief.wait_for("added")["index"] == 1
        end = chief.wait_for("end")
        assert end["count"] == end["applied"] == end["scheduled"] == end["total"], end
        assert end["ran_on"]["1"] >= 20


def _count_replicas() -> Any:
    return jnp.asarray(jaxdist.get_replica_context().num_replicas_in_sync)


def _make_strategy(
    workers: int = 1, replicas: int | None = None
) -> jaxdist.ParameterServerStrategy:
    names = [f"w:{n + 1}" for n in range(workers)]
    given: Any = {} if replicas is None else {"num_accelerators": {"CPU": replicas}}
    return jaxdist.ParameterServerStrategy(
        SimpleClusterResolver(
            ClusterSpec({"worker": names, "ps": ["p:1"]}), rpc_layer="local", **given
        )
    )


def test_workers_of_this_process_join_and_all_take_functions() -> None:
    strategy = _make_strategy()
    coordinator = ClusterCoordinator(strategy)
    meet = threading.Barrier(3)

    def own_numbers() -> list[Any]:
        # All three workers have to be there.
        meet.wait(60)
        return [np.int32(experimental_get_current_worker_index())] * 50

    assert [coordinator.add_worker(), coordinator.add_worker()] == [1, 2]
    with strategy.scope():
        count = jaxdist.Variable(0)
    numbers = iter(coordinator.create_per_worker_dataset(own_numbers))

    def step(numbers: Any) -> Any:
        count.assign_add(1)
        return next(numbers)

    results = [coordinator.schedule(step, (numbers,)) for _ in range(40)]
    assert {int(x) for x in coordinator.fetch(results)} <= {0, 1, 2}
    assert int(count) == 40
    assert coordinator.statistics().applied == 40
    assert len(strategy.links()) == 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_that_joins_has_as_many_replicas_as_the_others(replicas: int) -> None:
    most = len(jax.devices()) // replicas
    strategy = _make_strategy(1, replicas)
    coordinator = ClusterCoordinator(strategy)
    for index in range(1, min(most, 4)):
        assert coordinator.add_worker() == index
    results = [coordinator.schedule(lambda: strategy.run(_count_replicas)) for _ in range(20)]
    found = jax.tree.leaves(coordinator.fetch(results))
    assert {int(np.max(x)) for x in found} == {replicas}


def test_replicas_without_devices_do_not_join() -> None:
    count = len(jax.devices())
    if count == 1:
        pytest.skip("several replicas need several devices")
    coordinator = ClusterCoordinator(_make_strategy(1, count))
    with pytest.raises(DeviceError, match=rf"for worker 1, with {count} replicas"):
        coordinator.add_worker()
    assert coordinator.schedule(lambda: jnp.ones(())).fetch() == 1
    assert len(coordinator.strategy.links()) == 1


def test_workers_of_this_process_have_no_address() -> None:
    coordinator = ClusterCoordinator(_make_strategy())
    with pytest.raises(ArgumentError, match=r"They have no addresses"):
        coordinator.add_worker("localhost:1234")
    with pytest.raises(ContextError, match="while a function is traced"):
        jax.jit(lambda: coordinator.add_worker())()
    assert len(coordinator.strategy.links()) == 1


def test_what_cannot_join_is_named_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "60")
    ports = iter(find_free_ports(4))
    ps, first, second, nobody = (f"127.0.0.1:{next(ports)}" for _ in range(4))
    cluster = {"ps": [ps], "worker": [first]}
    servers = [
        jaxdist.Server(cluster, "ps", 0),
        jaxdist.Server(cluster, "worker", 0),
        # It has an index that is taken.
        jaxdist.Server({"ps": [ps], "worker": [second]}, "worker", 0, announce=True),
    ]
    try:
        resolver = SimpleClusterResolver(ClusterSpec(cluster), rpc_layer="grpc")
        coordinator = ClusterCoordinator(jaxdist.ParameterServerStrategy(resolver))
        with pytest.raises(ArgumentError, match=r"was given no address"):
            coordinator.add_worker()
        with pytest.raises(ArgumentError, match=r"An address is host:port"):
            coordinator.add_worker("localhost")
        with pytest.raises(ClusterError, match=r"is 'ps:0'"):
            coordinator.add_worker(ps)
        with pytest.raises(ClusterError, match=rf"{second} has the index 0, and so does .*{first}"):
            coordinator.add_worker(second)
        assert coordinator.add_worker(first) == 0
        joining = coordinator.strategy.joining()
        while f"{second} has announced itself, and cannot join" not in caplog.text:
            assert not joining.find_new()
        monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
        with pytest.raises(DeadlineExceededError):
            coordinator.add_worker(nobody)
        link = coordinator.strategy.links()[0]
        monkeypatch.setattr(link, "platform", "cuda")
        third = jaxdist.Server({"ps": [ps], "worker": {"7": nobody}}, "worker", 7)
        servers.append(third)
        with pytest.raises(UnsupportedError, match=r"computes on 'cpu', and .* on \['cuda'\]"):
            coordinator.add_worker(nobody)
        monkeypatch.setattr(link, "platform", "cpu")
        assert coordinator.add_worker(nobody) == 7
        assert coordinator.schedule(lambda: jnp.ones(())).fetch() == 1
        assert [other.index for other in coordinator.strategy.links()] == [0, 7]
    finally:
        for server in servers:
            server.stop()


def test_the_environment_says_whether_workers_announce_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}
    monkeypatch.setenv("JAXDIST_ANNOUNCE", "1")
    # Servers, and workers that say otherwise, do not.
    for job, announce in (("ps", None), ("worker", False)):
        server = jaxdist.Server(cluster, job, 0, announce=announce)
        names = {thread.name for thread in threading.enumerate()}
        server.stop()
        assert "jaxdist-announcer" not in names
    monkeypatch.setenv("JAXDIST_ANNOUNCE", "yes")
    with pytest.raises(ArgumentError, match=r"JAXDIST_ANNOUNCE is 'yes'"):
        jaxdist.Server(cluster, "worker", 0)


def test_a_worker_that_gave_up_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ps, worker = (f"127.0.0.1:{port}" for port in find_free_ports(2))
    cluster = {"ps": [ps], "worker": [worker]}
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    server = jaxdist.Server(cluster, "worker", 0, announce=True)
    with pytest.raises(
        ClusterError, match=rf"(?s)at {ps} has not answered .*Start the servers before"
    ):
        server.join()
    with pytest.raises(ContextError, match="the server does not run"):
        server.join()
    parameters = jaxdist.Server(cluster, "ps", 0)
    try:
        monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "60")
        server.start()
        joined = threading.Thread(target=server.join, daemon=True)
        joined.start()
        joined.join(0.2)
        assert joined.is_alive()
        server.stop()
        joined.join(30)
        assert not joined.is_alive()
    finally:
        server.stop()
        parameters.stop()


def test_only_workers_with_servers_announce_themselves() -> None:
    cluster = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}
    with pytest.raises(ArgumentError, match=r"announce=True, and a task of the job 'ps'"):
        jaxdist.Server(cluster, "ps", 0, announce=True)
    with pytest.raises(ArgumentError, match=r"a cluster without the task 0 of the job 'ps'"):
        jaxdist.Server({"worker": ["127.0.0.1:0"]}, announce=True)
