"""`RunConfig`: defaults, `replace`, and the task in `TF_CONFIG`.

The expected values are those of `tensorflow_estimator` 1.15.
"""

import json
from typing import Any

import pytest

import jaxdist
from jaxdist import estimator as est
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import ArgumentError, ArgumentTypeError, ClusterError, UnsupportedError

_CLUSTER = {
    "chief": ["host0:1"],
    "worker": ["host1:1", "host2:1", "host3:1"],
    "ps": ["host4:1", "host5:1"],
}


def _set(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    config = est.RunConfig()
    found = {
        name: getattr(config, name)
        for name in (
            "model_dir",
            "tf_random_seed",
            "save_summary_steps",
            "save_checkpoints_secs",
            "save_checkpoints_steps",
            "keep_checkpoint_max",
            "keep_checkpoint_every_n_hours",
            "log_step_count_steps",
            "train_distribute",
            "eval_distribute",
            "service",
        )
    }
    assert found == {
        "model_dir": None,
        "tf_random_seed": None,
        "save_summary_steps": 100,
        "save_checkpoints_secs": 600,
        "save_checkpoints_steps": None,
        "keep_checkpoint_max": 5,
        "keep_checkpoint_every_n_hours": 10000,
        "log_step_count_steps": 100,
        "train_distribute": None,
        "eval_distribute": None,
        "service": None,
    }
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    assert (config.master, config.evaluation_master, config.global_id_in_cluster) == ("", "", 0)
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 1)
    assert config.cluster_spec.as_dict() == {}


@pytest.mark.parametrize(
    ("job", "number", "is_chief", "global_id"),
    [
        ("chief", 0, True, 0),
        ("worker", 0, False, 1),
        ("worker", 2, False, 3),
        ("ps", 0, False, 4),
        ("ps", 1, False, 5),
    ],
)
def test_the_task_is_that_of_tf_config(
    job: str, number: int, is_chief: bool, global_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = {"key": "value"}
    _set(
        monkeypatch,
        {"cluster": _CLUSTER, "task": {"type": job, "index": number}, "service": service},
    )
    config = est.RunConfig()
    assert (config.task_type, config.task_id) == (job, number)
    assert (config.is_chief, config.global_id_in_cluster) == (is_chief, global_id)
    assert (config.num_ps_replicas, config.num_worker_replicas) == (2, 4)
    assert config.master == f"grpc://{_CLUSTER[job][number]}"
    assert config.evaluation_master == ""
    assert config.cluster_spec == ClusterSpec(_CLUSTER)
    assert config.service == service
    assert repr(config) == f"RunConfig(model_dir=None, task={job} {number})"


def test_an_evaluator_is_not_part_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"cluster": _CLUSTER, "task": {"type": "evaluator", "index": 0}}
    _set(monkeypatch, given)
    config = est.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("evaluator", 0, False)
    assert config.cluster_spec.as_dict() == {}
    assert (config.master, config.evaluation_master) == ("", "")
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 0)
    assert config.global_id_in_cluster is None
    _set(monkeypatch, {**given, "eval_session_master": "grpc://123"})
    assert est.RunConfig().evaluation_master == "grpc://123"


def test_a_session_master_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "worker", "index": 1}
    _set(monkeypatch, {"cluster": _CLUSTER, "task": task, "session_master": "_my_master"})
    assert est.RunConfig().master == "_my_master"
    _set(monkeypatch, {"session_master": "_my_master"})
    assert est.RunConfig().master == "_my_master"


def test_a_master_is_the_chief_of_older_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"master": ["host0:1"], "worker": ["host1:1"], "ps": ["host2:1"]}
    ids = {}
    for job in cluster:
        _set(monkeypatch, {"cluster": cluster, "task": {"type": job, "index": 0}})
        config = est.RunConfig()
        assert config.is_chief is (job == est.TaskType.MASTER)
        assert (config.num_ps_replicas, config.num_worker_replicas) == (1, 2)
        ids[job] = config.global_id_in_cluster
    assert ids == {"master": 0, "worker": 1, "ps": 2}


def test_with_a_strategy_worker_0_is_the_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["host1:1", "host2:1"]}
    strategy = jaxdist.MirroredStrategy(["cpu:0"])
    for number in range(2):
        _set(monkeypatch, {"cluster": cluster, "task": {"type": "worker", "index": number}})
        assert est.RunConfig(train_distribute=strategy).is_chief is (number == 0)
        with pytest.raises(ClusterError, match="exactly one chief"):
            est.RunConfig()


def test_tasks_numbered_with_gaps_have_ids_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"chief": ["host0:1"], "worker": {"1": "host1:1", "4": "host2:1"}, "ps": ["host3:1"]}
    ids = []
    for job, number in (("chief", 0), ("worker", 1), ("worker", 4), ("ps", 0)):
        _set(monkeypatch, {"cluster": cluster, "task": {"type": job, "index": number}})
        ids.append(est.RunConfig().global_id_in_cluster)
    assert ids == [0, 1, 2, 3]
    _set(monkeypatch, {"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with pytest.raises(ClusterError, match="the task worker 0"):
        est.RunConfig()


_TASK = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cluster": {"worker": ["a:1"]}, "task": _TASK}, "exactly one chief"),
        ({"cluster": {**_CLUSTER, "chief": ["a:1", "b:1"]}, "task": _TASK}, "exactly one chief"),
        ({"cluster": _CLUSTER, "task": {"index": 0}}, "type None and the index 0"),
        ({"cluster": _CLUSTER, "task": {"type": "worker"}}, "'worker' and the index None"),
        ({"cluster": _CLUSTER, "task": {"type": "worker", "index": -1}}, "task.index is -1"),
        ({"cluster": _CLUSTER, "task": {"type": "worker", "index": 3}}, "the task worker 3"),
        ({"cluster": _CLUSTER, "task": {"type": "other", "index": 0}}, "the task other 0"),
        ({"task": {"type": "chief", "index": 0}}, "only task is worker 0"),
        ({"task": {"type": "worker", "index": 1}}, "only task is worker 0"),
        (
            {
                "cluster": {"master": ["a:1"], "chief": ["b:1"]},
                "task": {"type": "master", "index": 0},
            },
            "has no chief",
        ),
        (
            {"cluster": {"master": ["a:1"]}, "task": {"type": "evaluator", "index": 0}},
            "has no evaluator",
        ),
        (
            {"cluster": {"master": ["a:1", "b:1"]}, "task": {"type": "master", "index": 0}},
            "exactly one master",
        ),
    ],
)
def test_a_tf_config_that_is_not_valid_is_a_named_error(
    config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, config)
    with pytest.raises(ClusterError, match=said) as caught:
        est.RunConfig()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("key", ["service", "model_dir"])
def test_values_of_the_wrong_type_in_tf_config_are_errors(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, {key: 1})
    with pytest.raises(ArgumentTypeError, match=f"'{key}' is 1"):
        est.RunConfig()


def test_the_folder_is_that_of_the_argument_or_of_tf_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set(monkeypatch, {"model_dir": "a"})
    assert est.RunConfig().model_dir == "a"
    assert est.RunConfig("a").model_dir == "a"
    with pytest.raises(ArgumentError, match="model_dir='b', and TF_CONFIG has 'a'"):
        est.RunConfig("b")
    with pytest.raises(ArgumentError, match="model_dir=''"):
        est.RunConfig("")


def test_replace_changes_what_it_lists_and_nothing_else() -> None:
    config = est.RunConfig("a", tf_random_seed=3, save_checkpoints_steps=7)
    other = config.replace(model_dir="b")
    assert (other.model_dir, other.tf_random_seed, other.save_checkpoints_steps) == ("b", 3, 7)
    assert config.model_dir == "a"
    by_time = config.replace(save_checkpoints_secs=60)
    assert (by_time.save_checkpoints_steps, by_time.save_checkpoints_secs) == (None, 60)
    by_step = by_time.replace(save_checkpoints_steps=9)
    assert (by_step.save_checkpoints_steps, by_step.save_checkpoints_secs) == (9, None)
    never = config.replace(save_checkpoints_steps=None, save_checkpoints_secs=None)
    assert (never.save_checkpoints_steps, never.save_checkpoints_secs) == (None, None)
    with pytest.raises(ArgumentError, match="save_checkpoints_steps=1, of type int and"):
        config.replace(save_checkpoints_steps=1, save_checkpoints_secs=1)
    with pytest.raises(ArgumentError, match="replace was given master='x'"):
        config.replace(master="x")


_PS_2 = jaxdist.ParameterServerStrategy


def _make_ps_2() -> Any:
    cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    return _PS_2(SimpleClusterResolver(cluster, rpc_layer="local"))


@pytest.mark.parametrize("name", ["train_distribute", "eval_distribute"])
def test_the_strategy_of_version_2_needs_a_coordinator(name: str) -> None:
    both = jaxdist.contrib.DistributeConfig(**{name: _make_ps_2()})
    given: list[dict[str, Any]] = [{name: _make_ps_2()}, {"experimental_distribute": both}]
    for arguments in given:
        with pytest.raises(ArgumentError, match="the one of version 2") as caught:
            est.RunConfig(**arguments)
        assert isinstance(caught.value, ValueError)


def test_strategies_are_given_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0"])
    both = jaxdist.contrib.DistributeConfig(train_distribute=strategy)
    config = est.RunConfig(experimental_distribute=both)
    assert config.train_distribute is strategy
    assert config.eval_distribute is None
    assert config.replace(model_dir="x").train_distribute is strategy
    with pytest.raises(ArgumentError, match="train_distribute and experimental_distribute"):
        est.RunConfig(train_distribute=strategy, experimental_distribute=both)
    with pytest.raises(ArgumentTypeError, match="train_distribute=3"):
        est.RunConfig(train_distribute=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="experimental_distribute=3"):
        est.RunConfig(experimental_distribute=3)
    remote = jaxdist.contrib.DistributeConfig(strategy, remote_cluster={"worker": ["a:1"]})
    with pytest.raises(UnsupportedError, match="remote_cluster="):
        est.RunConfig(experimental_distribute=remote)
    _set(monkeypatch, {"cluster": _CLUSTER, "task": _TASK})
    with pytest.raises(ArgumentError, match="and TF_CONFIG has a cluster"):
        est.RunConfig(experimental_distribute=remote)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_summary_steps", 0),
        ("save_checkpoints_steps", 0),
        ("save_checkpoints_secs", 0),
        ("log_step_count_steps", -1),
        ("keep_checkpoint_max", -1),
        ("keep_checkpoint_every_n_hours", 0),
        ("tf_random_seed", -1),
    ],
)
def test_numbers_out_of_range_are_named_errors(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=f"{name}={value}"):
        est.RunConfig(**{name: value})  # type: ignore[arg-type]


def test_both_times_of_checkpoints_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="after a number of steps, or after some time"):
        est.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
