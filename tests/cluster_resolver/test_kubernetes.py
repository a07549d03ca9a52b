"""The resolver of Kubernetes, with recorded lists of pods and environments of pods."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.cluster_resolver import KubernetesClusterResolver, KubernetesExecutableLocation
from jaxdist.errors import ArgumentError, ArgumentTypeError, ClusterError, MissingExtraError
from tests.strategies.oracle import refused


def _pod(name: str, host_ip: str, phase: str = "Running") -> Any:
    """What a `V1Pod` of the client has, of which most is not looked at."""
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name, namespace="default", labels={"job-name": name[:-2]}),
        status=SimpleNamespace(phase=phase, host_ip=host_ip, pod_ip="10.244.0.7"),
    )


PODS = {
    "job-name=tensorflow": [_pod("tensorflow-1", "10.0.0.2"), _pod("tensorflow-0", "10.0.0.1")],
    "job-name=more": [_pod("more-0", "10.0.0.9")],
    "job-name=slow": [_pod("slow-0", "10.0.0.9", "Pending")],
    "job-name=none": [],
}


class _Client:
    """Answers as `kubernetes.client.CoreV1Api` does."""

    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        return SimpleNamespace(items=PODS[label_selector])


def _lists(mapping: Any = None, **made: Any) -> KubernetesClusterResolver:
    return KubernetesClusterResolver(mapping, override_client=_Client(), **made)


def test_pods_are_sorted_by_name_and_have_the_address_of_their_host() -> None:
    resolver = _lists()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert resolver.master() == ""
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.0.0.2:8470"
    assert resolver.master("worker", 0, "http") == "http://10.0.0.1:8470"


def test_selectors_of_a_job_follow_one_another() -> None:
    mapping = {"worker": ["job-name=more", "job-name=tensorflow"], "ps": ["job-name=none"]}
    spec = _lists(mapping, tf_server_port=1).cluster_spec()
    assert spec.as_dict() == {"worker": ["10.0.0.9:1", "10.0.0.1:1", "10.0.0.2:1"], "ps": {}}


def test_a_pod_that_does_not_run_is_named_with_its_phase() -> None:
    with refused(ClusterError, "'slow-0'", "'Pending'", "kubectl get pods -l job-name=slow"):
        _lists({"worker": ["job-name=slow"]}).cluster_spec()


def test_wrong_arguments_are_refused() -> None:
    with refused(ArgumentError, "executable_location='here'", "WITHIN_CLUSTER"):
        _lists(executable_location="here")
    with refused(ArgumentError, "override_client", "CoreV1Api"):
        KubernetesClusterResolver(override_client=object())
    for mapping in ([1], {1: ["a"]}, {"worker": "a=b"}, {"worker": [1]}):
        with refused(ArgumentTypeError, "job_to_label_mapping"):
            _lists(mapping)


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with refused(MissingExtraError, "pip install kubernetes", "JOB_COMPLETION_INDEX"):
        KubernetesClusterResolver(environ={})


class _ConfigException(Exception):  # noqa: N818
    pass


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package `kubernetes` that says which credentials were loaded."""
    calls: list[str] = []
    package, config = types.ModuleType("kubernetes"), types.ModuleType("kubernetes.config")
    client = types.ModuleType("kubernetes.client")

    def fail() -> None:
        raise _ConfigException("Service host/port is not set.")

    vars(config).update(
        load_kube_config=lambda: calls.append("kube"),
        load_incluster_config=fail,
        ConfigException=_ConfigException,
    )
    vars(client).update(CoreV1Api=_Client)
    for module in (package, config, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_credentials_are_those_of_the_place(loaded: list[str]) -> None:
    off = KubernetesExecutableLocation.OFF_CLUSTER
    resolver = KubernetesClusterResolver(executable_location=off, environ={})
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert loaded == ["kube"]
    with refused(ClusterError, "WITHIN_CLUSTER", "not set", "OFF_CLUSTER"):
        KubernetesClusterResolver(environ={})


# The environment of pod 1 of an indexed Job, and of pod 1 of Job 1 of a JobSet, whose `env` takes
# the annotations of the pod.
INDEXED = {
    "HOSTNAME": "train-1",
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
JOBSET = {
    "HOSTNAME": "digits-workers-1-1",
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "digits",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JAX_PROCESS_COUNT": "4",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


def _indexed(environ: dict[str, str], **made: Any) -> KubernetesClusterResolver:
    return KubernetesClusterResolver(environ=environ, **made)


def test_an_indexed_job_has_the_names_of_its_service() -> None:
    resolver = _indexed(INDEXED, service="svc", processes=2)
    assert resolver.cluster_spec() == {"worker": ["train-0.svc:8470", "train-1.svc:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://train-1.svc:8470"
    for told in ({"JAX_PROCESS_COUNT": "2"}, {"PROCESSES_IN_JOB": "2"}):
        assert _indexed(INDEXED | told, service="svc").cluster_spec() == resolver.cluster_spec()


def test_a_jobset_has_a_service_of_its_own_name() -> None:
    resolver = _indexed(JOBSET)
    assert resolver.cluster_spec().job_tasks("worker") == [
        "digits-workers-0-0.digits:8470",
        "digits-workers-0-1.digits:8470",
        "digits-workers-1-0.digits:8470",
        "digits-workers-1-1.digits:8470",
    ]
    assert resolver.task_id == 3
    assert _indexed(JOBSET, service="other").master("worker", 0).endswith("0-0.other:8470")


def test_the_name_of_the_job_of_a_jobset_is_read_from_the_host_name() -> None:
    without = {n: v for n, v in JOBSET.items() if n != "REPLICATED_JOB_NAME"}
    assert _indexed(without).cluster_spec() == _indexed(JOBSET).cluster_spec()
    # In the host's network.
    on_host = JOBSET | {"HOSTNAME": "gke-node-7"}
    assert _indexed(on_host).cluster_spec() == _indexed(JOBSET).cluster_spec()


def test_a_jobset_of_one_job_needs_one_number() -> None:
    one = {"HOSTNAME": "d-w-0-1", "JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "d"}
    expected = ["d-w-0-0.d:8470", "d-w-0-1.d:8470"]
    assert _indexed(one, processes=2).cluster_spec().job_tasks("worker") == expected
    assert _indexed(one, processes_in_job=2).cluster_spec().job_tasks("worker") == expected


@pytest.mark.parametrize(
    ("environ", "made", "parts"),
    [
        (INDEXED, {"processes": 2}, ["service is missing", "subdomain", "service='my-service'"]),
        (INDEXED, {"service": "s"}, ["JAX_PROCESS_COUNT is missing", "processes"]),
        (INDEXED | {"JAX_PROCESS_COUNT": "x"}, {"service": "s"}, ["JAX_PROCESS_COUNT='x'"]),
        (INDEXED | {"JOB_COMPLETION_INDEX": "2"}, {"service": "s"}, ["'train-1'", "=2"]),
        (INDEXED, {"service": "s", "processes": 1}, ["pod 1 of Job 0", "1 Jobs with 1 pods"]),
        (JOBSET | {"JOB_INDEX": "0"}, {}, ["'digits-workers-1-1'", "JOB_INDEX=0"]),
        (JOBSET | {"JAX_PROCESS_COUNT": "3"}, {}, ["3 processes", "2 in each Job"]),
        (JOBSET | {"JAX_PROCESS_COUNT": "2"}, {}, ["pod 1 of Job 1", "1 Jobs with 2 pods"]),
        (
            {n: v for n, v in JOBSET.items() if n != "PROCESSES_IN_JOB"},
            {},
            ["PROCESSES_IN_JOB is missing", "completions"],
        ),
        (
            {n: v for n, v in JOBSET.items() if n != "REPLICATED_JOB_NAME"} | {"HOSTNAME": "n7"},
            {},
            ["REPLICATED_JOB_NAME is missing", "'n7'", "replicatedjob-name"],
        ),
    ],
)
def test_what_the_environment_of_a_pod_lacks_or_contradicts_is_named(
    environ: dict[str, str], made: dict[str, Any], parts: list[str]
) -> None:
    with refused(ClusterError, "KubernetesClusterResolver", *parts):
        _indexed(environ, **made)
