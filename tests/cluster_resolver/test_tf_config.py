"""The resolver of TF_CONFIG, compared with what TensorFlow answered to the same texts."""

import json
from typing import Any

import pytest

from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.errors import ArgumentTypeError, ClusterError, NotFoundError
from tests.cluster_resolver.answers.record import answer, is_same, read
from tests.strategies.oracle import refused

CLUSTER = {"worker": ["a:1", "b:1"]}


def _resolver(config: Any, **made: Any) -> TFConfigClusterResolver:
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(**made, environ={"TF_CONFIG": text})


def _differs_on_purpose(row: dict[str, Any]) -> bool:
    """TensorFlow takes null as the job 'None', -1 as a task, and what is no object as empty."""
    if row["tf_config"] is None:
        return False
    try:
        config = json.loads(row["tf_config"])
    except json.JSONDecodeError:
        return False
    task = config.get("task", {}) if isinstance(config, dict) else None
    return not isinstance(task, dict) or task.get("type", "") is None or task.get("index") == -1


def test_every_answer_is_that_of_tensorflow() -> None:
    compared = 0
    for row in read("tf_config"):
        environ = {} if row["tf_config"] is None else {"TF_CONFIG": row["tf_config"]}
        made = TFConfigClusterResolver(**row["made"], environ=environ)
        ours = {
            "cluster_spec": answer(made.cluster_spec),
            "task_type": answer(lambda made=made: made.task_type),
            "task_id": answer(lambda made=made: made.task_id),
            "rpc_layer": answer(lambda made=made: made.rpc_layer),
            "environment": answer(lambda made=made: made.environment),
            "master": answer(lambda made=made, row=row: made.master(**row["asked"])),
        }
        wrong = {name: found for name, found in ours.items() if not is_same(found, row[name])}
        if _differs_on_purpose(row):
            assert all("error" in found for found in wrong.values()), (row, wrong)
        else:
            compared += 1
            assert wrong == {}, row
    assert compared > 150


def test_a_later_change_of_the_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER}))
    assert resolver.cluster_spec() == CLUSTER


def test_what_is_set_later_counts_more_than_the_variable() -> None:
    resolver = _resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "grpc"
    assert resolver.master() == "grpc://b:1"
    assert resolver.num_accelerators() == {}


@pytest.mark.parametrize(
    ("config", "ask", "parts"),
    [
        ("not json", "cluster_spec", ["TF_CONFIG='not json'", "not valid JSON", '"cluster"']),
        ("[" * 100_000, "cluster_spec", ["not valid JSON"]),
        ([1], "cluster_spec", ["TF_CONFIG='[1]'", "list", '"cluster"']),
        ({"cluster": {"worker": {"x": "a:1"}}}, "cluster_spec", ["'x'", "TF_CONFIG=", "jobs"]),
        ({"task": "worker"}, "task_type", ["'worker'", "'type' and 'index'"]),
        ({"task": {"type": ["worker"]}}, "task_type", ["task.type is ['worker']", "list"]),
        ({"task": {"index": "x"}}, "task_id", ["task.index is 'x'", "from 0 up"]),
        ({"task": {"index": -1}}, "task_id", ["task.index is -1"]),
        ({"rpc_layer": 3}, "rpc_layer", ["'rpc_layer' is 3"]),
        ({"cluster": CLUSTER}, "master", ["None None", '"task"']),
    ],
)
def test_a_malformed_variable_is_quoted_with_the_rule_and_an_example(
    config: Any, ask: str, parts: list[str]
) -> None:
    with refused(ClusterError, "TFConfigClusterResolver read TF_CONFIG=", *parts):
        found = getattr(_resolver(config), ask)
        found()


def test_wrong_types_in_the_cluster_are_type_errors() -> None:
    for cluster in ([1], {"worker": "a:1"}, {"worker": [1]}, None):
        with refused(ArgumentTypeError, "TFConfigClusterResolver read TF_CONFIG="):
            _resolver({"cluster": cluster}).cluster_spec()
    with refused(ArgumentTypeError, "task.index is 1.5"):
        _ = _resolver({"task": {"index": 1.5}}).task_id


def test_a_task_that_the_cluster_does_not_have_is_refused() -> None:
    with refused(NotFoundError, "TFConfigClusterResolver.master", "task_id=7", "[0, 1]"):
        _resolver({"cluster": CLUSTER}).master("worker", 7)
    with refused(ArgumentTypeError, "environ", "int"):
        TFConfigClusterResolver(environ=3)  # type: ignore[arg-type]
    with refused(ArgumentTypeError, "environment", "int"):
        TFConfigClusterResolver(environment=3)  # type: ignore[arg-type]
