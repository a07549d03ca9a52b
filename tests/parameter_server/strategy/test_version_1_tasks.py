"""`ParameterServerStrategy` of version 1: the tasks of a cluster, and what each of them does.

Flags and names of devices are those of TensorFlow 2.21.
"""

import copy
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import InputReplicationMode, PerReplica, VariableAggregation
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClusterError,
    ContextError,
    MissingNameError,
    OutOfRangeError,
    UnsupportedError,
)
from tests.parameter_server.strategy.version_1 import (
    ParameterServerStrategy,
    make_resolver,
    make_spec,
    make_worker,
    run_workers,
)

_CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}
_WITHOUT_CHIEF = {"worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}


def _make(tasks: dict[str, Any], job: Any, number: Any, **more: Any) -> Any:
    resolver = SimpleClusterResolver(
        ClusterSpec(tasks), task_type=job, task_id=number, rpc_layer="local", **more
    )
    return ParameterServerStrategy(resolver)


@pytest.mark.parametrize(
    ("tasks", "job", "number", "is_chief"),
    [
        (_CLUSTER, "chief", 0, True),
        (_CLUSTER, "worker", 0, False),
        (_CLUSTER, "worker", 1, False),
        (_CLUSTER, "ps", 1, False),
        (_CLUSTER, "evaluator", 0, True),
        (_CLUSTER | {"evaluator": ["f:1"]}, "evaluator", 0, True),
        (_WITHOUT_CHIEF, "worker", 0, True),
        (_WITHOUT_CHIEF, "worker", 1, False),
        # Numbers with gaps.
        ({"worker": {3: "b:1", 5: "c:1"}, "ps": ["d:1", "e:1"]}, "worker", 3, True),
        ({"worker": {3: "b:1", 5: "c:1"}, "ps": ["d:1", "e:1"]}, "worker", 5, False),
    ],
)
def test_flags_and_devices_follow_from_the_task(
    tasks: dict[str, Any], job: str, number: int, is_chief: bool
) -> None:
    extended = _make(tasks, job, number).extended
    assert extended.experimental_between_graph is True
    assert extended.experimental_should_init is is_chief
    assert extended.should_checkpoint is is_chief
    assert extended.should_save_summary is is_chief
    [device] = extended.worker_devices
    assert device.startswith(f"/job:{job}/replica:0/task:{number}/device:CPU:")
    if job == "evaluator":
        # It is connected with no server, and has variables of its own.
        assert extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    else:
        assert extended.parameter_devices == ("/job:ps/task:0", "/job:ps/task:1")


@pytest.mark.parametrize(
    ("tasks", "job", "number", "said"),
    [
        ({"worker": ["a:1"]}, "worker", 0, "parameter servers"),
        (_CLUSTER, None, None, "has to identify the task"),
        (_CLUSTER, "worker", None, "has to identify the task"),
        (_CLUSTER, "worker", 2, "2 tasks of that job"),
        (_WITHOUT_CHIEF, "chief", 0, "0 tasks of that job"),
        ({"worker": {0: "a:1", 2: "b:1"}, "ps": ["c:1"]}, "worker", 1, "2 tasks of that job"),
        (_CLUSTER, "evaluator", 1, "0 tasks of that job"),
        ({"worker": ["a:1"], "ps": []}, "worker", 0, "parameter servers"),
        (_CLUSTER, "master", 0, "the job 'master'"),
        (_CLUSTER | {"helper": ["f:1"]}, "worker", 0, "the job 'helper'"),
        (_CLUSTER | {"chief": ["a:1", "f:1"]}, "worker", 0, "at most one chief"),
    ],
)
def test_a_cluster_that_does_not_fit_is_a_named_error(
    tasks: dict[str, Any], job: Any, number: Any, said: str
) -> None:
    with pytest.raises(ClusterError, match=said) as caught:
        _make(tasks, job, number)
    assert isinstance(caught.value, ValueError)


def test_what_is_no_resolver_is_an_error() -> None:
    with pytest.raises(ArgumentTypeError, match="cluster_resolver=7"):
        ParameterServerStrategy(7)  # type: ignore[arg-type]


def test_tf_config_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": _CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "local"}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ParameterServerStrategy()
    assert isinstance(strategy.cluster_resolver, TFConfigClusterResolver)
    assert strategy.cluster_resolver.task_id == 1
    assert strategy.num_replicas_in_sync == 1
    assert not strategy.extended.should_checkpoint


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_a_cluster_variables_are_on_one_device_of_this_process(
    monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = SimpleClusterResolver(ClusterSpec({}), num_accelerators={"CPU": replicas})
    strategy = ParameterServerStrategy(resolver)
    assert strategy.num_replicas_in_sync == replicas
    assert len(strategy.extended.worker_devices) == replicas
    assert strategy.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert strategy.extended.should_checkpoint
    with strategy.scope():
        x = jaxdist.Variable(10.0, aggregation=VariableAggregation.SUM)
    assert x.device == strategy.extended.parameter_devices[0]
    strategy.run(lambda one: x.assign_add(one), (PerReplica([np.float32(1)] * replicas),))
    assert float(x) == 10 + replicas
    other = copy.deepcopy(strategy)
    assert other is not strategy
    assert other.extended.parameter_devices == strategy.extended.parameter_devices


def test_a_strategy_with_servers_cannot_be_copied() -> None:
    with pytest.raises(ContextError, match="on its servers"):
        copy.deepcopy(make_worker())


def test_each_worker_reads_its_own_input() -> None:
    def script(strategy: Any, index: int) -> Any:
        seen = []

        def input_fn(context: Any) -> Any:
            seen.append(
                (
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                )
            )
            return [np.full(2, 10 * context.input_pipeline_id + n) for n in range(4)]

        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        rows = []
        for _ in range(2):
            total = strategy.run(lambda x: x.sum(), (iterator.get_next(),))
            rows.append(int(strategy.reduce("sum", total, axis=None)))
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        iterator.initialize()
        again = strategy.run(lambda x: x.sum(), (iterator.get_next(),))
        assert int(strategy.reduce("sum", again)) == rows[0]
        return set(seen), rows

    found = run_workers(script, make_spec(2, chief=True), replicas=2)
    for index, (seen, rows) in enumerate(found):
        assert seen == {(2, index, 2)}
        base = 2 * 2 * 10 * index
        assert rows == [base + 2 * (0 + 1), base + 2 * (2 + 3)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_datasets_give_each_worker_all_batches(replicas: int) -> None:
    strategy = make_worker(replicas)
    examples = strategy.experimental_make_numpy_dataset(np.arange(8, dtype="float32"))
    iterator = strategy.make_dataset_iterator(examples.batch(4))
    found = [
        float(strategy.reduce("sum", strategy.run(lambda x: x.sum(), (batch,))))
        for batch in (iterator.get_next(), iterator.get_next())
    ]
    assert found == [6, 22]
    total = strategy.experimental_run(
        lambda x: jaxdist.get_replica_context().all_reduce("sum", x.sum()),
        strategy.make_dataset_iterator(examples.batch(8)),
    )
    assert float(total) == 28
    batches = list(strategy.experimental_distribute_dataset([np.arange(4), np.arange(4)]))
    assert len(batches) == 2
    with pytest.raises(UnsupportedError):
        strategy.distribute_datasets_from_function(
            lambda context: [np.zeros(2)],
            jaxdist.InputOptions(
                experimental_fetch_to_device=False,
                experimental_replication_mode=InputReplicationMode.PER_REPLICA,
            ),
        )


def test_a_parameter_server_reads_no_input() -> None:
    strategy = _make(_CLUSTER, "ps", 0)
    with pytest.raises(ClusterError, match="/job:ps/replica:0/task:0"):
        strategy.make_input_fn_iterator(lambda context: [np.zeros(2)])


@pytest.mark.parametrize("layer", ["grpc", "local"])
def test_a_parameter_server_makes_no_variable(layer: str) -> None:
    spec = ClusterSpec({"worker": ["a.example:1"], "ps": ["b.example:1", "c.example:1"]})
    resolver = SimpleClusterResolver(spec, task_type="ps", task_id=1, rpc_layer=layer)
    strategy = ParameterServerStrategy(resolver)
    # At once: no task answers at these addresses.
    with (
        strategy.scope(),
        pytest.raises(ClusterError, match=r"(?s)ps 1 of its.*--index 1") as caught,
    ):
        jaxdist.Variable(1.0, name="v")
    assert "Variable 'v' was made" in str(caught.value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_extended(replicas: int) -> None:
    strategy = make_worker(replicas)
    extended = strategy.extended
    with strategy.scope():
        v, w = jaxdist.Variable(1.0, name="v"), jaxdist.Variable(2.0, name="a")
        with extended.colocate_vars_with(v):
            jaxdist.Variable(0.0)
        assert float(extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,))) == 3
        devices = extended.non_slot_devices([v, w])
        assert devices is w
        assert float(extended.update_non_slot(devices, lambda x: x + 1, args=(2.0,))) == 3
    assert float(v) == float(extended.read_var(v)) == 3
    assert extended.value_container(v) is v
    assert extended.variable_created_in_scope(v)
    values = PerReplica([np.float32(n + 1) for n in range(replicas)])
    total = replicas * (replicas + 1) / 2
    own = extended.worker_devices[-1]
    for destination in (v, own, list(extended.worker_devices), "/job:worker/task:0"):
        assert float(extended.reduce_to("sum", values, destination)) == total
        assert float(extended.batch_reduce_to("sum", [(values, destination)])[0]) == total
        assert float(extended.broadcast_to(np.float32(3), destination)) == 3
    assert float(extended.call_for_each_replica(lambda: v.assign_add(1.0))) == 4
    context = extended.experimental_run_steps_on_iterator(
        lambda context, x: context.set_last_step_output(
            "total", strategy.run(lambda x: x.sum(), (x,)), "sum"
        ),
        strategy.make_dataset_iterator([np.arange(4), np.arange(4, 8)]),
        iterations=2,
    )
    assert int(context.last_step_outputs["total"]) == 22


@pytest.mark.parametrize(
    "device", ["/job:worker/replica:0/task:1/device:CPU:0", "/job:ps/task:0", "/job:chief/task:0"]
)
def test_values_are_not_reduced_to_another_task(device: str) -> None:
    extended = ParameterServerStrategy(make_resolver(make_spec(2), "worker", 0)).extended
    with pytest.raises(ArgumentError, match="this process is /job:worker/replica:0/task:0"):
        extended.reduce_to("sum", PerReplica([1.0]), device)
    with pytest.raises(ArgumentError, match="stays with it"):
        extended.batch_reduce_to("sum", [(PerReplica([1.0]), device)])
    with pytest.raises(ArgumentError, match="stays with it"):
        extended.broadcast_to(1.0, [device])


def test_non_slot_devices_need_a_variable() -> None:
    extended = make_worker().extended
    with pytest.raises(ArgumentError, match=r"var_list=\[\]"):
        extended.non_slot_devices([])
    with pytest.raises(ArgumentTypeError, match="var_list"):
        extended.non_slot_devices([1])


def test_there_is_no_session_to_configure() -> None:
    with pytest.raises(MissingNameError, match="no sessions"):
        make_worker().update_config_proto({})  # type: ignore[attr-defined]


def test_a_step_that_changes_variables_of_servers_is_not_lowered() -> None:
    strategy = make_worker()
    with strategy.scope():
        v = jaxdist.Variable(1.0, name="v")
        table = jaxdist.Variable(np.zeros((3, 2), "float32"), name="table")
    strategy.lower(lambda: v.value() + 1)
    for change in (
        lambda: v.assign_add(1.0),
        lambda: table.scatter_add(jaxdist.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))),
    ):
        with pytest.raises(UnsupportedError, match=r"strategy\.lower"):
            strategy.lower(change)


def test_the_page_of_this_class_is_complete() -> None:
    strategy = make_worker(2)
    assert isinstance(strategy, jaxdist.compat.v1.Strategy)
    for name in (
        "cluster_resolver",
        "extended",
        "num_replicas_in_sync",
        "experimental_distribute_dataset",
        "experimental_make_numpy_dataset",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "reduce",
        "run",
        "scope",
    ):
        assert hasattr(strategy, name)
    assert int(strategy.reduce("sum", PerReplica([1, 2]))) == 3
