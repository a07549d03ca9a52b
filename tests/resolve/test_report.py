"""`jaxdist resolve`: who a process would be, and what looks wrong."""

import json
import socket
from typing import Any

import pytest

from jaxdist._resolve import (
    Network,
    Report,
    choose_source,
    make_report,
    make_resolver,
)
from jaxdist.errors import ArgumentError, ClusterError
from tests.strategies.oracle import refused


class _Network(Network):
    """A machine `h0` with the address 10.0.0.1, which knows h1 to h3 and nobody else."""

    def __init__(
        self,
        used: int = 0,
        names: dict[str, str] | None = None,
        name: str = "h0",
        gpus: bool = False,
        is_connected: bool = True,
    ) -> None:
        self.names = {f"h{i}": f"10.0.0.{i + 1}" for i in range(4)} | {"localhost": "127.0.0.1"}
        self.names |= names or {}
        self.used, self.name, self.asked = used, name, list[tuple[str, int]]()
        self.gpus, self.is_connected = gpus, is_connected

    def get_host_name(self) -> str:
        return self.name

    def find_addresses(self, host: str) -> tuple[str, ...]:
        if host[0].isdigit():
            return (host,)
        return (self.names[host],) if host in self.names else ()

    def is_own(self, host: str) -> bool:
        return self.find_addresses(host)[0] in ("10.0.0.1", "127.0.0.1", "127.0.1.1")

    def is_used(self, host: str, port: int) -> bool:
        return port == self.used

    def is_listening(self, host: str, port: int) -> bool:
        self.asked.append((host, port))
        return port == self.used

    def find_source(self, host: str) -> str | None:
        reached = next(iter(self.find_addresses(host)), "127.")
        if reached.startswith("127."):
            return reached
        return "10.0.0.1" if self.is_connected else None

    def has_gpus(self) -> bool:
        return self.gpus

    def find_interface(self, address: str) -> str | None:
        return {"10.0.0.1": "eth1", "127.0.0.1": "lo"}.get(address)

    def find_bind_address(self, addresses: list[str]) -> str:
        host, _, port = addresses[0].partition(":")
        return f"{(*self.find_addresses(host), '[::]')[0]}:{port}"


def _report(
    addresses: Any,
    index: Any = 0,
    network: Network | None = None,
    environ: dict[str, str] | None = None,
    **made: Any,
) -> Report:
    cluster = addresses if isinstance(addresses, dict) else {"worker": addresses}
    job, number = index if isinstance(index, tuple) else ("worker", index)
    config = {"cluster": cluster, "task": {"type": job, "index": number}}
    variables = {"TF_CONFIG": json.dumps(config)} | (environ or {})
    resolver = make_resolver("tf_config", variables)
    return make_report("tf_config", resolver, variables, network or _Network(), **made)


def _texts(report: Report) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in report.findings]


TWO = ["h0:2222", "h1:2222"]


def test_the_first_worker_of_two_hosts() -> None:
    report = _report(TWO)
    assert (_texts(report), report.exit_code) == ([], 0)
    assert dict(report.lines) == {
        "found in": "tf_config",
        "this process": "worker 0, process 0 of 2, h0:2222",
        "process 0": "worker 0, h0:2222",
        "JAX's service": "10.0.0.1:2222, bound by this process",
        "gloo": "10.0.0.1, the address of h0 in the cluster",
    }


def test_the_chief_is_process_0_and_others_connect_to_it() -> None:
    report = _report({"worker": ["h0:1", "h1:1"], "chief": ["h2:5"]})
    lines = dict(report.lines)
    assert lines["this process"] == "worker 0, process 1 of 3, h0:1"
    assert (lines["process 0"], lines["JAX's service"]) == (
        "chief 0, h2:5",
        "h2:5, bound by process 0",
    )


def test_who_does_not_train_binds_nothing() -> None:
    cluster = {"worker": ["h1:1", "h2:1"], "ps": ["h0:1"]}
    lines = dict(_report(cluster, ("evaluator", 0)).lines)
    assert (
        lines["this process"]
        == "evaluator 0, which is not one of the 2 processes that train together"
    )
    assert "gloo" not in lines
    assert dict(_report(cluster, ("ps", 0)).lines)["process 0"] == "worker 0, h1:1"


def test_one_process_alone() -> None:
    resolver = make_resolver("tf_config", {})
    report = make_report("tf_config", resolver, {}, _Network())
    assert report.lines == (("this process", "process 0 of 1: no cluster was found"),)
    assert report.exit_code == 0


def test_loopback_and_a_launcher_that_hosts_the_service() -> None:
    local = ["localhost:1", "localhost:2"]
    assert dict(_report(local, 1).lines)["JAX's service"].startswith("127.0.0.1:1, as all")
    launched = _report(local, environ={"JAXDIST_SERVICE": "127.0.0.1:9"})
    assert dict(launched.lines)["JAX's service"] == "127.0.0.1:9, hosted by the launcher"
    assert launched.exit_code == 0


DEBIAN = {"h0": "127.0.1.1"}


@pytest.mark.parametrize(
    ("report", "level", "parts"),
    [
        (lambda: _report(["h0:1", "h1:1", "h1:1"]), "error", ["worker 1 and worker 2", "h1:1"]),
        (lambda: _report(["localhost:1", "h1:1"]), "error", ["localhost", "h1 is another host"]),
        (lambda: _report(["127.0.0.1:1", "h1:1"]), "error", ["127.0.0.1"]),
        (lambda: _report(["h0:1", "nowhere:1"]), "error", ["nowhere has no address"]),
        (lambda: _report(TWO, network=_Network(used=2222)), "error", ["Port 2222 of h0", "in use"]),
        (
            lambda: _report(TWO, network=_Network(names={"h1": "127.0.1.1"})),
            "warning",
            ["h1 is 127.0.1.1 here"],
        ),
        (
            lambda: _report(TWO, network=_Network(names=DEBIAN, is_connected=False)),
            "warning",
            ["would use 127.0.1.1, the address of the host name h0"],
        ),
        (
            lambda: _report(["h1:1", "h2:1"], network=_Network(name="pod-7", is_connected=False)),
            "error",
            ["h1 is not an address of this machine", "host name pod-7 has no address"],
        ),
        (
            lambda: _report(
                TWO, network=_Network(gpus=True), environ={"NCCL_SOCKET_IFNAME": "eth0,ib"}
            ),
            "warning",
            ["NCCL_SOCKET_IFNAME=eth0,ib", "10.0.0.1", "belongs to eth1"],
        ),
        (lambda: _report(TWO, 1), "warning", ["h1, which is not an address of this machine"]),
        (
            lambda: _report(TWO, environ={"HTTPS_PROXY": "http://me:secret@proxy:3128"}),
            "warning",
            ["HTTPS_PROXY=http://***@proxy:3128", "no_proxy=h0,h1"],
        ),
        (
            lambda: _report(TWO, environ={"http_proxy": "http://p:1", "no_proxy": "h0, x"}),
            "warning",
            ["http_proxy=http://p:1", "no_proxy=h1"],
        ),
        (
            lambda: _report(TWO, environ={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}),
            "warning",
            ["job 7", "without `srun`"],
        ),
        (
            lambda: _report(
                TWO,
                environ={
                    "SLURM_JOB_ID": "7",
                    "SLURM_STEP_ID": "0",
                    "SLURM_NTASKS": "4",
                    "SLURM_STEP_NUM_TASKS": "1",
                },
            ),
            "warning",
            ["SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=1"],
        ),
        (
            lambda: _report(TWO, environ={"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),
            "warning",
            ["SLURM_PROCID=1 contradicts", "would be 0"],
        ),
        (
            lambda: _report(TWO, environ={"JAX_NUM_PROCESSES": "3"}),
            "warning",
            ["JAX_NUM_PROCESSES=3", "would be 2"],
        ),
        (
            lambda: _report(TWO, environ={"JAX_COORDINATOR_ADDRESS": "h1:9"}),
            "warning",
            ["JAX_COORDINATOR_ADDRESS=h1:9", "h0:2222"],
        ),
        (
            lambda: _report(["h1:1", "h0:1"], 1, probe=True),
            "warning",
            ["Nothing listens at h1:1"],
        ),
    ],
)
def test_what_looks_wrong_is_told_once(report: Any, level: str, parts: list[str]) -> None:
    found = report()
    matching = [text for _, text in _texts(found) if all(part in text for part in parts)]
    assert len(matching) == 1, _texts(found)
    assert found.findings[0].level == level
    assert found.exit_code == {"error": 2, "warning": 1}[level]


def test_the_own_name_that_debian_maps_to_127_0_1_1_is_fine() -> None:
    report = _report(TWO, network=_Network(names=DEBIAN))
    assert (_texts(report), report.exit_code) == ([], 0)
    assert dict(report.lines)["gloo"] == "10.0.0.1, from which h1 is reached"
    launched = {"JAXDIST_SERVICE": "h2:9"}
    report = _report(TWO, network=_Network(names=DEBIAN), environ=launched)
    assert dict(report.lines)["gloo"] == "10.0.0.1, from which h2 is reached"
    report = _report(TWO, network=_Network(names=DEBIAN, is_connected=False))
    assert dict(report.lines)["gloo"] == "127.0.1.1, from the host name h0"


@pytest.mark.parametrize(
    ("addresses", "environ", "line"),
    [
        (TWO, {}, "=eth1, the interface of 10.0.0.1"),
        (TWO, {"NCCL_SOCKET_IFNAME": "eth"}, "eth, from the environment"),
        (["localhost:1", "localhost:2"], {}, "not set: NCCL chooses"),
        (["h2:1", "h1:1"], {}, "=eth1, the interface of 10.0.0.1"),
    ],
)
def test_with_gpus_the_network_of_nccl_is_shown(
    addresses: list[str], environ: dict[str, str], line: str
) -> None:
    report = _report(addresses, network=_Network(gpus=True), environ=environ)
    assert dict(report.lines)["NCCL_SOCKET_IFNAME"] == line
    assert not any("NCCL" in text for _, text in _texts(report))


@pytest.mark.parametrize(
    "environ",
    [
        {"https_proxy": "http://p:1", "no_proxy": "*"},
        {"https_proxy": "http://p:1", "NO_PROXY": "h0,h1"},
        {"https_proxy": ""},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        # The shell in which everything else is started.
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"JAX_COORDINATOR_ADDRESS": "h0:2222"},
    ],
)
def test_what_is_right_is_not_told(environ: dict[str, str]) -> None:
    assert _texts(_report(TWO, environ=environ)) == []


def test_a_domain_in_no_proxy_has_its_hosts() -> None:
    names = {"a.site.org": "10.0.0.1", "b.site.org": "10.0.0.2"}
    environ = {"http_proxy": "http://p:1", "no_proxy": ".site.org"}
    hosts = [f"{name}:1" for name in names]
    assert _texts(_report(hosts, network=_Network(names=names), environ=environ)) == []


def test_nobody_is_connected_to_without_being_asked() -> None:
    network = _Network()
    _report(["h1:1", "h0:1"], 1, network)
    assert network.asked == []
    _report(["h1:1", "h0:1"], 1, network, probe=True)
    assert network.asked == [("h1", 1)]
    _report(["h0:1", "h1:1"], 0, network, probe=True)
    assert len(network.asked) == 1, "process 0 itself"


def test_a_process_that_is_none_of_the_tasks_is_an_error() -> None:
    with refused(ClusterError, "jaxdist resolve", "'worker' 5", "TF_CONFIG="):
        _report(TWO, 5)
    with refused(ClusterError, "'h0'", "host:port"):
        _report(["h0", "h1:1"])


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({}, "tf_config"),
        ({"TF_CONFIG": "{}", "SLURM_JOB_ID": "1"}, "tf_config"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "tf_config"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "tf_config"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "slurm"),
        ({"JOB_COMPLETION_INDEX": "0"}, "tf_config"),
        ({"JOB_COMPLETION_INDEX": "0", "JAXDIST_CLUSTER": "kubernetes"}, "kubernetes"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, "tf_config"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "tpu"),
    ],
)
def test_the_source_is_what_the_environment_has(environ: dict[str, str], source: str) -> None:
    assert choose_source(environ) == source


def test_slurm_and_pods_are_read_from_the_environment() -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "h[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    resolver = make_resolver("slurm", step, port=7000)
    report = make_report("slurm", resolver, step, _Network())
    assert dict(report.lines)["this process"] == "worker 0, process 0 of 2, h0:7000"
    assert _texts(report) == []
    pod = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
    resolver = make_resolver("kubernetes", pod, service="svc", processes=2, task_id=0)
    lines = dict(make_report("kubernetes", resolver, pod, _Network()).lines)
    assert lines["this process"] == "worker 0, process 0 of 2, train-0.svc:8470"


def test_hosts_of_a_tpu_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "h0,h1")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    resolver = make_resolver("tpu", {}, task_type="worker")
    lines = dict(make_report("tpu", resolver, {}, _Network()).lines)
    assert lines["this process"] == "worker 0, process 0 of 2, h0:8482"


def test_an_instance_group_needs_its_place() -> None:
    with refused(ArgumentError, "--zone None", "--instance-group my-group"):
        make_resolver("gce", {}, project="p")
    with pytest.raises(ImportError, match="google-api-python-client"):
        make_resolver("gce", {}, project="p", zone="z", instance_group="g")


def test_this_machine_sees_its_own_names_and_ports() -> None:
    network = Network()
    assert network.get_host_name() == socket.gethostname()
    assert network.find_addresses("localhost")
    assert network.find_addresses("no.such.host.invalid") == ()
    assert network.is_own("127.0.0.1")
    # An address for documentation, which no machine has.
    assert not network.is_own("192.0.2.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.is_used("127.0.0.1", port)
        assert network.is_listening("127.0.0.1", port)
    assert not network.is_used("127.0.0.1", port)
    assert not network.is_listening("127.0.0.1", port)
    assert network.find_bind_address(["127.0.0.1:5", "127.0.0.1:6"]) == "127.0.0.1:5"
