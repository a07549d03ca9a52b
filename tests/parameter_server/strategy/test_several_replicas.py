"""Workers of `ParameterServerStrategy` with several replicas."""

from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import ParameterServerStrategy, VariableAggregation
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import DeviceError, UnsupportedError
from tests.parameter_server.strategy.making import make_resolver


def _make(replicas: int = 2, workers: int = 2) -> ParameterServerStrategy:
    return ParameterServerStrategy(
        make_resolver(workers=workers, num_accelerators={"CPU": replicas})
    )


def test_replicas_of_a_worker_are_in_step_and_each_closure_counts_once() -> None:
    strategy = _make()
    coordinator = ClusterCoordinator(strategy)
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        x = jaxdist.Variable(0.0, aggregation=VariableAggregation.SUM)
        z = jaxdist.Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)

    def replica_fn() -> Any:
        context = jaxdist.get_replica_context()
        number = context.replica_id_in_sync_group
        x.assign_add(number + 1.0)
        z.assign_add(1)
        return context.all_reduce("sum", number), number

    found = [coordinator.schedule(lambda: strategy.run(replica_fn)) for _ in range(20)]
    coordinator.join()
    assert (float(x), int(z)) == (20 * 3, 20)
    for value in found:
        total, number = value.fetch()
        assert int(total) == 1
        assert [int(n) for n in strategy.experimental_local_results(number)] == [0, 1]


def test_each_worker_splits_its_batches_over_its_own_devices() -> None:
    strategy = _make()
    coordinator = ClusterCoordinator(strategy)
    contexts = []

    def dataset_fn() -> Any:
        def make(context: Any) -> Any:
            contexts.append(context.num_replicas_in_sync)
            return [np.full((3, 2), float(n), "float32") for n in range(8)]

        return strategy.distribute_datasets_from_function(make)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    def step(iterator: Any) -> Any:
        totals = strategy.run(lambda x: x.sum(), (next(iterator),))
        return strategy.reduce("sum", totals, axis=None), totals

    found = [coordinator.schedule(step, (iterator,)) for _ in range(4)]
    coordinator.join()
    assert set(contexts) == {2}
    for value in found:
        total, parts = value.fetch()
        first, second = (float(x) for x in strategy.experimental_local_results(parts))
        assert second == first + 6
        assert float(total) == first + second


def test_the_resolver_states_how_many_replicas_there_are() -> None:
    assert _make(1).num_replicas_in_sync == 1
    assert ParameterServerStrategy(make_resolver()).num_replicas_in_sync == 1
    assert _make(4).num_replicas_in_sync == 4
    assert ParameterServerStrategy(
        make_resolver(num_accelerators={"GPU": 0})
    ).num_replicas_in_sync == (1)
    with pytest.raises(DeviceError, match=r"\{'CPU': 5\}"):
        _make(5)
    with pytest.raises(DeviceError, match="this process, which has 0 such devices"):
        ParameterServerStrategy(make_resolver(num_accelerators={"GPU": 2}))


def test_workers_of_other_processes_have_one_replica() -> None:
    tasks = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    resolver = SimpleClusterResolver(
        ClusterSpec(tasks), task_type="chief", task_id=0, num_accelerators={"GPU": 2}
    )
    with pytest.raises(UnsupportedError, match="and workers in other processes"):
        ParameterServerStrategy(resolver)
