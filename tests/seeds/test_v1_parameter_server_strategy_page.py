"""The page of `tf.compat.v1.distribute.experimental.ParameterServerStrategy`.

Changes: see `parameter_server_job.py`; and there are no sessions.
"""

import inspect
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Variable, VariableAggregation
from jaxdist.cluster_resolver import TFConfigClusterResolver
from tests.launching.launcher import start_launcher
from tests.parameter_server.strategy.version_1 import (
    ParameterServerStrategy,
    make_spec,
    make_worker,
    run_workers,
)
from tests.ports import find_free_ports
from tests.processes.job import results_of_job
from tests.seeds import parameter_server_job
from tests.seeds.programs import find_own_task, make_tf_config

_SERVERS = [f"/job:ps/replica:0/task:{n}/device:CPU:0" for n in range(2)]


def test_the_class_has_the_argument_and_the_base_class_of_the_page() -> None:
    found = inspect.signature(ParameterServerStrategy).parameters
    assert [(name, p.default) for name, p in found.items()] == [("cluster_resolver", None)]
    assert issubclass(ParameterServerStrategy, jaxdist.compat.v1.Strategy)


def test_without_a_resolver_tf_config_says_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    task = {"type": "worker", "index": 0}
    config = {"cluster": cluster, "task": task, "rpc_layer": "local"}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ParameterServerStrategy()
    assert isinstance(strategy.cluster_resolver, TFConfigClusterResolver)
    assert strategy.cluster_resolver.cluster_spec().as_dict() == cluster
    assert strategy.cluster_resolver.task_type == "worker"


def test_attributes_of_the_page() -> None:
    strategy = make_worker(2)
    assert isinstance(strategy.extended, jaxdist.StrategyExtended)
    assert strategy.num_replicas_in_sync == 2
    assert jaxdist.OneDeviceStrategy("cpu:0").cluster_resolver is None


def test_the_example_of_cluster_resolver_takes_the_branch_of_a_worker() -> None:
    ports = find_free_ports(3)
    found = results_of_job(find_own_task, 2, env=lambda n: make_tf_config(ports, n), service=False)
    assert [(f["branch"], f["task"]) for f in found] == [("worker", 0), ("worker", 1)]


def test_variables_are_on_the_servers_and_operations_on_the_workers() -> None:
    strategy = make_worker(2)
    assert strategy.extended.parameter_devices == ("/job:ps/task:0", "/job:ps/task:1")
    with strategy.scope():
        one, other = Variable(1.0), Variable(2.0)
    assert [one.device, other.device] == _SERVERS
    doubled = strategy.run(lambda x: x * one, (PerReplica([np.float32(2), np.float32(3)]),))
    assert [float(v) for v in doubled.values] == [2, 3]
    assert all(device.startswith("/job:worker/") for device in strategy.extended.worker_devices)


def test_operations_are_on_all_devices_of_a_worker_and_a_variable_is_there_once() -> None:
    strategy = make_worker(2)
    with strategy.scope():
        v = Variable(0.0, aggregation=VariableAggregation.SUM)
    assert len(strategy.extended.worker_devices) == 2
    ids = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    assert [int(i) for i in ids.values] == [0, 1]
    strategy.run(lambda x: v.assign_add(x), (PerReplica([np.float32(1), np.float32(10)]),))
    # One update, with what both replicas have computed.
    assert float(v) == 11


def test_workers_run_the_same_code_and_update_the_variables_without_waiting() -> None:
    def work(strategy: Any, number: int) -> Any:
        with strategy.scope():
            total = Variable(0.0, aggregation=VariableAggregation.SUM)
            step = Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)

        def update(x: Any) -> None:
            total.assign_add(x)
            step.assign_add(1)

        one = PerReplica([np.float32(1)] * strategy.num_replicas_in_sync)
        # Workers take different numbers of steps, so a step cannot wait for the other worker.
        for _ in range(3 + 4 * number):
            strategy.run(update, (one,))
        # The servers end with their last strategy.
        return strategy, total, step

    # The first replica of each worker alone counts steps.
    for _, total, step in run_workers(work, make_spec(2, 2), replicas=2):
        assert (float(total), int(step)) == (20, 10)


@pytest.mark.parametrize("replicas", [1, 2])
def test_call_for_each_replica_is_used_with_one_device_too(replicas: int) -> None:
    strategy = make_worker(replicas)
    with strategy.scope():
        found = strategy.extended.call_for_each_replica(lambda x: x + 1, (np.float32(1),))
    assert [float(v) for v in strategy.experimental_local_results(found)] == [2] * replicas


def test_a_device_scope_does_not_move_a_variable() -> None:
    strategy = make_worker()
    with strategy.scope(), jax.default_device(jax.devices()[1]):
        v = Variable(1.0)
    assert v.device in _SERVERS


def test_variables_are_colocated_by_the_method_that_the_page_names() -> None:
    strategy = make_worker()
    with strategy.scope():
        one, other = Variable(1.0), Variable(2.0)
        assert one.device != other.device
        with strategy.extended.colocate_vars_with(other):
            slots = [Variable(0.0), Variable(0.0)]
    assert [slot.device for slot in slots] == [other.device] * 2, "colocated"


def test_the_example_with_an_estimator_trains_in_one_process(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    result = parameter_server_job.train(str(tmp_path), 100)
    assert result is not None
    assert result["global_step"] == 100
    assert result["loss"] < 0.05


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_with_an_estimator_trains_in_all_tasks_of_a_job(
    tmp_path: pathlib.Path,
) -> None:
    script = str(pathlib.Path(parameter_server_job.__file__))
    options = ("--ps", "1", "--workers", "2", "--evaluator")
    env: dict[str, str | None] = {"JAX_PLATFORMS": "cpu"}
    with start_launcher(*options, script, str(tmp_path), "120", env=env) as job:
        [outcome] = job.wait(150)
        assert outcome.exit_code == 0, outcome.describe()
    for task in ("chief 0", "worker 0", "worker 1", "evaluator 0"):
        assert f"{task} has ended" in outcome.stdout
    results = jaxdist.estimator.experimental.read_eval_metrics(tmp_path / "eval")
    last = max(results)
    assert last >= 120
    assert results[last]["loss"] < 0.05
