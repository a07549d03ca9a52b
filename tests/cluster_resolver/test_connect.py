"""Which task a process is, and how the processes of a cluster connect."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist import _processes
from jaxdist._called import called, name_call
from jaxdist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    find_own_task,
    list_training_tasks,
)
from jaxdist.config import experimental_connect_to_cluster
from jaxdist.errors import ArgumentTypeError, ClusterError
from tests.ports import find_free_ports
from tests.strategies.oracle import refused

FOUR = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"], "chief": ["c:1"]}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What processes were told to join, without joining."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_processes, "join", lambda *how: calls.append((name_call(), *how)))
    return calls


def _simple(cluster: Any, job: str | None = None, index: int | None = None) -> ClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)


def _told(text: str) -> ClusterResolver:
    return TFConfigClusterResolver(environ={"TF_CONFIG": text})


def test_a_cluster_of_several_tasks_meets_at_the_first(joined: list[tuple[Any, ...]]) -> None:
    experimental_connect_to_cluster(_simple(FOUR, "worker", 1))
    assert joined == [("experimental_connect_to_cluster", ["c:1", "w0:1", "w1:1"], 2)]
    experimental_connect_to_cluster(_simple(FOUR), "chief", 0)
    assert joined[1][2] == 0
    experimental_connect_to_cluster(_simple(FOUR, "ps", 0))
    experimental_connect_to_cluster(_simple(FOUR, "evaluator", 0))
    assert len(joined) == 2, "parameter servers and evaluators run no step with the others"


def test_a_cluster_of_one_task_needs_no_meeting(joined: list[tuple[Any, ...]]) -> None:
    experimental_connect_to_cluster(_simple({"worker": ["a:1"]}))
    experimental_connect_to_cluster(_simple({}, "worker", 0))
    experimental_connect_to_cluster({"worker": ["a:1"]})
    experimental_connect_to_cluster(_simple({"worker": ["a:1"], "ps": ["b:1"]}, "worker", 0))
    assert joined == []


def test_a_cluster_is_given_as_a_spec_a_dict_or_a_message(joined: list[tuple[Any, ...]]) -> None:
    spec = ClusterSpec(FOUR)
    server = SimpleNamespace(cluster=spec.as_cluster_def(), job_name="worker", task_index=1)
    for given in (spec, FOUR, spec.as_cluster_def()):
        experimental_connect_to_cluster(given, "worker", 1)
        experimental_connect_to_cluster(given, "chief")
    experimental_connect_to_cluster(server)  # type: ignore[arg-type]
    experimental_connect_to_cluster(server, task_index=0)  # type: ignore[arg-type]
    assert [how[2] for how in joined] == [2, 0, 2, 0, 2, 0, 2, 1]


def test_a_cluster_does_not_say_which_task_this_process_is(joined: list[tuple[Any, ...]]) -> None:
    with refused(ClusterError, "3 jobs", "no job_name", "job_name='worker'"):
        experimental_connect_to_cluster(FOUR)
    with refused(ClusterError, "2 tasks of job 'worker'", "no task_index"):
        experimental_connect_to_cluster(FOUR, "worker")
    with refused(ClusterError, "0 jobs", "no job_name"):
        experimental_connect_to_cluster({})
    for wrong in (3, [("worker", ["a:1"])], {"worker": 3}, None):
        with refused(ArgumentTypeError, "cluster_spec_or_resolver"):
            experimental_connect_to_cluster(wrong)  # type: ignore[arg-type]
    assert joined == []


def test_a_process_that_is_none_of_the_tasks_is_refused(joined: list[tuple[Any, ...]]) -> None:
    two = {"worker": ["w0:1", "w1:1"]}
    with refused(ClusterError, "2 tasks", "'worker' 5", "'worker', 0"):
        experimental_connect_to_cluster(_simple(two, "worker", 5))
    with refused(ClusterError, "'worker' 2"):
        experimental_connect_to_cluster(two, "worker", 2)
    with pytest.raises(ValueError, match="None None"):
        experimental_connect_to_cluster(_simple(two))
    assert joined == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"task": {"type": "worker", "index": 1}}', ["no cluster", "'worker' 1", '"cluster": {']),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
            ["2 tasks", "'worker' 2", '"task": {"type": "worker", "index": 0}'],
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            ["1 tasks", "'worker' 1"],
        ),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', ["None None"]),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "wroker", "index": 0}}',
            ["unknown type 'wroker'", "chief, worker, evaluator, ps", "'worker'"],
        ),
        (
            '{"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}',
            ["unknown type 'master'", "Call it 'chief'"],
        ),
        (
            '{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}',
            ["2 chiefs"],
        ),
        ('{"cluster": {"worker": []}}', ["no cluster"]),
    ],
)
@called("Strategy")
def test_a_tf_config_that_says_something_impossible_is_quoted(text: str, parts: list[str]) -> None:
    with refused(ClusterError, "Strategy", "TF_CONFIG=", *parts):
        find_own_task(_told(text))


@called("Strategy")
def test_a_job_without_a_cluster_is_one_process() -> None:
    assert find_own_task(_told("{}")) is None
    assert find_own_task(TFConfigClusterResolver(environ={})) is None
    assert list_training_tasks(_told("{}")) == {}


@called("Strategy")
def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}'
    assert find_own_task(_told(text)) == ("evaluator", 0)
    assert list(list_training_tasks(_told(text))) == [("worker", 0), ("worker", 1)]


@called("Strategy")
def test_the_only_task_of_a_cluster_is_this_process() -> None:
    assert find_own_task(_simple({"worker": {2: "a:1"}})) == ("worker", 2)


MEET = """
import sys, jax
from jaxdist.cluster_resolver import ClusterSpec
from jaxdist.config import experimental_connect_to_cluster
index, *ports = map(int, sys.argv[1:])
spec = ClusterSpec({"worker": [f"localhost:{port}" for port in ports]})
for _ in range(2):
    experimental_connect_to_cluster(spec, "worker", index)
print(jax.process_index(), jax.process_count(), len(jax.devices()))
"""


def test_two_processes_meet_once_and_see_each_others_devices() -> None:
    ports = list(map(str, find_free_ports(2)))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    environment.pop("XLA_FLAGS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(i), *ports],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        told = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [text.splitlines()[-1] for text in told] == ["0 2 2", "1 2 2"]
