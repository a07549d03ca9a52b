"""Variables of a `CentralStorageStrategy` are on one device; everything else is as if mirrored."""

import dataclasses
import logging
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import IndexedSlices, MirroredStrategy, PerReplica, Variable, VariableAggregation
from jaxdist import VariableSynchronization as Synchronization
from jaxdist._devices import device_name
from jaxdist._processes import Process
from jaxdist._strategies import central_storage
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    MixedStrategyError,
    SeveralProcessesError,
    StateDivergenceError,
)
from jaxdist.experimental import CentralStorageStrategy
from jaxdist.testing import launch

NAME = "/job:localhost/replica:0/task:0/device:CPU:{}"
SUM, MEAN, FIRST, NONE = (
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
    VariableAggregation.NONE,
)


def _two(parameter_device: Any = "cpu:3") -> CentralStorageStrategy:
    return CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device)


def _variable(strategy: jaxdist.Strategy, value: Any = 10.0, **given: Any) -> Variable:
    with strategy.scope():
        return Variable(value, **given)


# tensorflow-cpu 2.21: compute devices, parameter device, worker_devices, parameter_devices.
MADE = [
    ((), [0], 0),
    ((["cpu:1"],), [1], 1),
    ((["cpu:1", "cpu:2"],), [1, 2], 0),
    ((None, "cpu:1"), [0], 1),
    (("cpu:2", "/device:CPU:4"), [2], 4),
]


@pytest.mark.parametrize(("given", "workers", "parameters"), MADE)
def test_the_devices_are_those_of_tensorflow(given: Any, workers: Any, parameters: int) -> None:
    strategy = CentralStorageStrategy(*given)
    # TensorFlow gives a list here, and a tuple for the other strategies.
    assert strategy.extended.worker_devices == [NAME.format(i) for i in workers]
    assert strategy.extended.parameter_devices == (NAME.format(parameters),)
    assert strategy.num_replicas_in_sync == len(workers)
    assert strategy.cluster_resolver is None
    assert _variable(strategy).device == NAME.format(parameters)


def test_all_accelerators_compute_where_there_are_some() -> None:
    found = [mock.Mock(platform="gpu"), mock.Mock(platform="gpu")]
    with mock.patch.object(central_storage.runtime, "default_devices", return_value=found):
        assert central_storage._find_default_devices() == found


# tensorflow-cpu 2.21, for AUTO, ON_WRITE and ON_READ alike: the variable is 10 and replicas assign
# 1 and 3, or all of them the constant 3; None: ValueError.
ASSIGNED = {
    (SUM, "assign"): (4, None),
    (SUM, "assign_add"): (14, None),
    (SUM, "assign_sub"): (6, None),
    (MEAN, "assign"): (2, 3),
    (MEAN, "assign_add"): (12, 13),
    (MEAN, "assign_sub"): (8, 7),
    (FIRST, "assign"): (1, 3),
    (FIRST, "assign_add"): (11, 13),
    (FIRST, "assign_sub"): (9, 7),
}


@pytest.mark.parametrize("parameter_device", ["cpu:0", "cpu:3", "pinned_host"])
@pytest.mark.parametrize("mode", [Synchronization.AUTO, Synchronization.ON_READ])
@pytest.mark.parametrize("case", ASSIGNED, ids=lambda c: f"{c[0].name}-{c[1]}")
def test_replicas_assign_as_in_tensorflow(
    case: tuple[VariableAggregation, str], mode: Synchronization, parameter_device: str
) -> None:
    aggregation, method = case
    strategy = _two(parameter_device)
    for constant, wanted in zip((False, True), ASSIGNED[case], strict=True):
        v = _variable(strategy, synchronization=mode, aggregation=aggregation)

        def step(x: Any, v: Variable = v, constant: bool = constant) -> Any:
            return getattr(v, method)(3.0 if constant else x)

        if wanted is None:
            with pytest.raises(ValueError, match="constant"):
                strategy.run(step, (PerReplica([1.0, 3.0]),))
            continue
        # Both replicas read what all of them have assigned, as with one variable they must.
        assert strategy.run(step, (PerReplica([1.0, 3.0]),)).tolist() == wanted
        assert float(v) == wanted
        v.assign_add(2.0)
        assert float(v) == wanted + 2


def test_without_aggregation_replicas_may_assign_equal_values_only() -> None:
    strategy = _two()
    for mode in (Synchronization.ON_WRITE, Synchronization.ON_READ):
        v = _variable(strategy, synchronization=mode)
        with pytest.raises(StateDivergenceError, match="VariableAggregation"):
            strategy.run(lambda x, v=v: v.assign(x), (PerReplica([1.0, 3.0]),))
        strategy.run(lambda x, v=v: v.assign_add(x), (jnp.float32(5),))
        assert float(v) == 15


@pytest.mark.parametrize("parameter_device", ["cpu:0", "cpu:3", "pinned_host"])
def test_a_variable_is_one_array_on_the_parameter_device(parameter_device: str) -> None:
    strategy = _two(parameter_device)
    v = _variable(strategy, np.zeros((4, 2), np.float32), aggregation=MEAN)
    device = jax.devices()[0 if parameter_device == "pinned_host" else int(parameter_device[-1])]
    kind = "pinned_host" if parameter_device == "pinned_host" else "device"
    rows = IndexedSlices(jnp.ones((1, 2)), jnp.array([3]))

    def check() -> None:
        assert v._held.devices() == {device}
        assert v._held.sharding.memory_kind in (kind, None)
        assert v._held.dtype == jnp.float32

    check()
    for change in (
        lambda: strategy.run(lambda x: v.assign_add(x), (PerReplica([np.ones((4, 2))] * 2),)),
        lambda: strategy.run(lambda: v.scatter_add(rows)),
        lambda: v.assign(np.ones((4, 2))),
        lambda: v.assign(jax.device_put(np.ones((4, 2), np.float32), jax.devices()[5])),
        lambda: v.assign_sub(jnp.ones((4, 2))),
        lambda: v.assign_add(PerReplica([np.ones((4, 2))] * 2)),
        lambda: v.scatter_add(rows),
        lambda: v[1:2].assign(np.zeros((1, 2))),
        lambda: jaxdist.function(lambda: v.assign_add(jnp.ones((4, 2))))(),
        lambda: jaxdist.function(lambda: v.scatter_add(rows))(),
    ):
        change()
        check()
    assert v.numpy().tolist() == [[2, 2], [1, 1], [2, 2], [4, 4]]
    # A reader gets a copy on every compute device, as a step does.
    assert v.value().devices() == {jax.devices()[0], jax.devices()[1]}
    assert len(v.values) == 2
    assert v.device == device_name(device)


def test_a_single_device_with_its_own_variables_moves_nothing() -> None:
    v = _variable(CentralStorageStrategy("cpu:2"))
    assert v.value() is v._held


def _train(strategy: jaxdist.Strategy) -> tuple[Any, ...]:
    """Train an NNX module and a variable; return what both are, and the losses."""
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        bias = Variable(np.zeros(1, np.float32), aggregation=MEAN)

    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: Any) -> Any:
        def loss(model: nnx.Linear, shift: Any) -> Any:
            return jnp.mean((model(x) + shift[None] - x.sum(1, keepdims=True)) ** 2)

        value, (grads, shift) = nnx.value_and_grad(loss, argnums=(0, 1))(model, bias.value())
        replica = jaxdist.get_replica_context()
        optimizer.update(model, replica.all_reduce("mean", grads))
        bias.assign_sub(0.1 * shift)
        return replica.all_reduce("mean", value)

    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    data = PerReplica(np.split(batch, strategy.num_replicas_in_sync))
    losses = [float(strategy.run(step, (model, optimizer, data))) for _ in range(5)]
    return np.asarray(model.kernel[...]), bias.numpy(), losses, model


@pytest.mark.parametrize("parameter_device", ["cpu:0", "cpu:3", "pinned_host"])
def test_training_gives_what_a_mirrored_strategy_gives(parameter_device: str) -> None:
    *wanted, _ = _train(MirroredStrategy(["cpu:0", "cpu:1"]))
    *found, model = _train(_two(parameter_device))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[2][-1] < found[2][0]
    # NNX modules are on the compute devices.
    assert model.kernel[...].devices() == {jax.devices()[0], jax.devices()[1]}


def test_numpy_arrays_are_datasets() -> None:
    strategy = _two()
    dataset = strategy.experimental_make_numpy_dataset(np.arange(6.0))
    assert [float(x) for x in dataset] == [0, 1, 2, 3, 4, 5]


def test_input_options_are_taken() -> None:
    # In TensorFlow a misspelled attribute makes this an AttributeError.
    strategy = _two()
    options = jaxdist.InputOptions(experimental_fetch_to_device=True)
    found = strategy.experimental_distribute_dataset([np.arange(4.0)], options)
    assert [v.tolist() for v in next(iter(found)).values] == [[0, 1], [2, 3]]


def test_a_nested_structure_is_reduced() -> None:
    # In TensorFlow this is a ValueError for central storage.
    found = _two().reduce("SUM", {"a": PerReplica([1.0, 2.0])}, axis=None)
    assert float(found["a"]) == 3


def test_a_variable_of_another_strategy_is_refused() -> None:
    v = _variable(MirroredStrategy(["cpu:0", "cpu:1"]))
    with pytest.raises(MixedStrategyError, match="another strategy"):
        _two().run(lambda: v.read_value())


def test_wrong_devices_are_refused_by_name() -> None:
    for given, error, found in (
        ("cpu:99", DeviceError, "parameter_device"),
        ("disk", DeviceError, "disk"),
        (3, ArgumentTypeError, "parameter_device=3"),
        (["cpu:0"], ArgumentTypeError, "parameter_device="),
    ):
        with pytest.raises(error, match=found):
            _two(given)
    with pytest.raises(DeviceError, match=r"compute_devices with the same device twice"):
        CentralStorageStrategy(["cpu:0", "cpu:0"])
    with pytest.raises((ArgumentError, ArgumentTypeError), match="compute_devices"):
        CentralStorageStrategy(3)  # type: ignore[arg-type]


def test_a_device_without_pinned_host_memory_is_named() -> None:
    layout = _two().layout
    bare = mock.Mock(platform="cpu", process_index=0)
    bare.addressable_memories.return_value = [mock.Mock(kind="device")]
    bare.id = 0
    with (
        mock.patch.object(type(layout), "devices", (bare,)),
        pytest.raises(DeviceError, match=r"the memories \['device'\]"),
    ):
        central_storage._find_memory(layout, "pinned_host")


def test_a_parameter_device_of_another_process_is_refused() -> None:
    layout = dataclasses.replace(_two().layout, process=Process(1, 2))
    with pytest.raises(SeveralProcessesError, match="a device of process 0, and this is process 1"):
        central_storage._find_memory(layout, "cpu:3")


def _refusals_in_a_job() -> list[str]:
    jaxdist.MultiWorkerMirroredStrategy()  # where the processes meet
    found = []
    others = [d for d in jax.devices() if d.process_index != jax.process_index()]
    own = jax.local_devices()
    for given in ((), (others,), (own, others[0])):
        try:
            CentralStorageStrategy(*given)
        except SeveralProcessesError as error:
            found.append(str(error).splitlines()[0])
    with jaxdist.experimental.CentralStorageStrategy(own).scope():
        found.append(str(float(Variable(1.0))))
    return found


@pytest.mark.slow
def test_in_a_job_of_several_processes_it_works_on_one_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "jaxdist")
    for found in launch(_refusals_in_a_job, 2, timeout_seconds=100):
        assert [line[: len("CentralStorage")] for line in found[:3]] == ["CentralStorage"] * 3
        assert "parameter_device=" in found[2]
        assert found[3] == "1.0"
