"""Cluster specs, and the resolver that is told everything."""

import collections
import types
from typing import Any

import pytest

from jaxdist.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver
from jaxdist.errors import ArgumentError, ArgumentTypeError, NotFoundError
from tests.strategies.oracle import refused

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {"3": "c:1", 1: "d:1"}, "empty": {}})


def test_lists_stay_lists_and_tasks_with_gaps_are_dicts() -> None:
    assert SPEC.as_dict() == {"worker": ["a:1", "b:1"], "ps": {1: "d:1", 3: "c:1"}, "empty": {}}
    assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_jobs_keep_their_order_and_the_repr_sorts_them() -> None:
    assert SPEC.jobs == ["worker", "ps", "empty"]
    assert repr(SPEC).index("'ps'") < repr(SPEC).index("'worker'")


def test_tasks_are_counted_and_addressed() -> None:
    assert [SPEC.num_tasks(job) for job in SPEC.jobs] == [2, 2, 0]
    assert SPEC.task_indices("ps") == [1, 3]
    assert SPEC.task_address("ps", 3) == "c:1"
    assert SPEC.job_tasks("ps") == [None, "d:1", None, "c:1"]


def test_specs_are_equal_to_one_another_and_to_dicts() -> None:
    assert ClusterSpec(SPEC) == SPEC == SPEC.as_dict()
    assert ClusterSpec({"worker": ["a:1"]}) != ClusterSpec({"worker": ["b:1"]})
    assert SPEC != {"worker": 3}
    assert SPEC != {"worker": {"x": "a:1"}}
    assert SPEC != {"worker": {-1: "a:1"}}
    assert not ClusterSpec({})
    assert SPEC


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        (["a:1"], ["list"]),
        ({"worker": "a:1"}, ["'worker'", "str"]),
        ({"worker": [1]}, ["cluster['worker'][0]=1", "int"]),
        ({1: ["a:1"]}, ["a job", "1, of type int"]),
        ({"worker": {1.5: "a:1"}}, ["'worker'", "1.5"]),
        ({"worker": {None: "a:1"}}, ["'worker'", "None"]),
        ("worker", ["'worker', of type str"]),
    ],
)
def test_what_is_no_cluster_is_refused(cluster: Any, parts: list[str]) -> None:
    with refused(ArgumentTypeError, *parts):
        ClusterSpec(cluster)


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "", -1])
def test_a_task_without_a_number_is_refused(number: Any) -> None:
    with refused(ArgumentError, repr(number), "numbered from 0"):
        ClusterSpec({"worker": {number: "a:1"}})


def test_a_cluster_def_has_the_fields_of_the_message_and_is_taken_back() -> None:
    found = SPEC.as_cluster_def()
    assert [job.name for job in found.job] == ["empty", "ps", "worker"]
    assert [dict(job.tasks) for job in found.job] == [
        {},
        {1: "d:1", 3: "c:1"},
        {0: "a:1", 1: "b:1"},
    ]
    assert ClusterSpec(found) == SPEC
    # A message of TensorFlow has its jobs in a container that is no list.
    message = types.SimpleNamespace(job=collections.deque(found.job))
    assert ClusterSpec(message) == SPEC  # type: ignore[arg-type]
    for wrong in (types.SimpleNamespace(job="worker"), types.SimpleNamespace(job=[1])):
        with refused(ArgumentTypeError, "namespace"):
            ClusterSpec(wrong)  # type: ignore[arg-type]


def test_jobs_and_tasks_that_are_not_there_are_refused() -> None:
    with refused(NotFoundError, "'chief'", "['worker', 'ps', 'empty']"):
        SPEC.num_tasks("chief")
    with refused(NotFoundError, "task_index=2", "[1, 3]"):
        SPEC.task_address("ps", 2)
    with refused(NotFoundError, "'empty', and this job has no tasks"):
        SPEC.job_tasks("empty")
    with pytest.raises(ValueError, match="chief"):
        SPEC.task_indices("chief")


def test_the_abstract_resolver_is_not_made() -> None:
    with pytest.raises(TypeError):
        ClusterResolver()  # type: ignore[abstract]


def test_master_is_the_task_that_is_asked_for_or_the_stored_one() -> None:
    resolver = SimpleClusterResolver(
        SPEC, master="m:1", task_type="worker", task_id=1, rpc_layer="grpc"
    )
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker") == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 0, rpc_layer="http") == "http://a:1"
    assert resolver.master("worker", 0, rpc_layer="") == "grpc://a:1"
    assert SimpleClusterResolver(SPEC).master() == ""


def test_simple_resolver_says_what_it_was_told() -> None:
    resolver = SimpleClusterResolver(SPEC, environment="here", num_accelerators={"TPU": 8})
    assert resolver.cluster_spec() is SPEC
    assert resolver.num_accelerators() == {"TPU": 8}
    assert SimpleClusterResolver(SPEC).num_accelerators() == {}
    assert (resolver.environment, resolver.task_type, resolver.task_id) == ("here", None, None)
    resolver.task_type, resolver.task_id = "ps", 3
    assert (resolver.task_type, resolver.task_id) == ("ps", 3)
    with pytest.raises(AttributeError):
        resolver.environment = "there"  # type: ignore[misc]


def test_simple_resolver_takes_a_spec_and_a_string() -> None:
    with refused(ArgumentTypeError, "dict", "ClusterSpec("):
        SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]
    with refused(ArgumentTypeError, "master", "int"):
        SimpleClusterResolver(SPEC, master=1)  # type: ignore[arg-type]


def test_a_resolver_of_ones_own_counts_the_accelerators_of_this_process() -> None:
    class Mine(ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            return SPEC

        def master(self, task_type=None, task_id=None, rpc_layer=None) -> str:
            return ""

    assert Mine().num_accelerators() == Mine().num_accelerators("worker", 0) == {}
    assert Mine().environment == ""


def test_settings_of_a_session_have_no_effect() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), num_accelerators={"GPU": 2})
    assert resolver.num_accelerators(config_proto=object()) == {"GPU": 2}
