"""TPUStrategy: which chip each logical device of each replica is, and the page's examples."""

import copy
import os
import subprocess
import sys
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from jaxdist import PerReplica, TPUStrategy, tpu
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import ArgumentTypeError, TopologyError
from jaxdist.tpu.experimental import DeviceAssignment, initialize_tpu_system
from tests.strategies.oracle import refused


def _resolver(name: str = "v4:2x2x1") -> TPUClusterResolver:
    return TPUClusterResolver(f"virtual:{name}")


def _chip(device: jax.Device, name: str = "v4:2x2x1") -> tuple[int, ...]:
    """Where the virtual slice puts a CPU device."""
    [core] = [c for c in tpu.slice_of(name).cores if c.id == device.id]
    return (*core.coords, core.core_on_chip)


def test_each_replica_gets_its_rows_on_the_core_that_the_assignment_says() -> None:
    resolver = _resolver("v5e:4x2")
    assignment = DeviceAssignment.build(initialize_tpu_system(resolver), num_replicas=8)
    strategy = TPUStrategy(resolver, assignment)
    rows = jax.device_put(np.arange(8), strategy.per_replica_sharding)
    for shard in rows.addressable_shards:
        [replica] = np.asarray(shard.data).tolist()
        assert _chip(shard.device, "v5e:4x2") == assignment.coordinates(replica, 0)
    ids = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    for shard in ids.array.addressable_shards:
        [replica] = np.asarray(shard.data).tolist()
        assert _chip(shard.device, "v5e:4x2") == assignment.coordinates(replica, 0)


def test_each_logical_device_holds_its_columns_on_the_core_that_the_assignment_says() -> None:
    resolver = _resolver()
    assignment = DeviceAssignment.build(
        initialize_tpu_system(resolver), computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = TPUStrategy(resolver, assignment)
    assert dict(strategy.mesh.shape) == {"replica": 4, "logical": 2}
    split = NamedSharding(strategy.mesh, PartitionSpec("replica", "logical"))
    places = np.array([[10 * r + d for d in range(2)] for r in range(4)])
    for shard in jax.device_put(places, split).addressable_shards:
        replica, logical = divmod(int(np.asarray(shard.data).item()), 10)
        assert _chip(shard.device) == assignment.coordinates(replica, logical)


def test_reversed_cores_reverse_the_replicas_and_not_the_results() -> None:
    resolver = _resolver("v5e:1x2")
    topology = initialize_tpu_system(resolver)
    cores = topology.device_coordinates.reshape(2, 1, 4)
    forward, back = (
        TPUStrategy(resolver, DeviceAssignment(topology, order)) for order in (cores, cores[::-1])
    )
    assert back.mesh.devices.ravel().tolist() == forward.mesh.devices.ravel().tolist()[::-1]
    values = PerReplica([1.0, 42.0])
    for strategy in (forward, back):
        local = strategy.experimental_local_results(strategy.run(lambda x: x, (values,)))
        assert [float(v) for v in local] == [1.0, 42.0]


def test_without_an_assignment_every_core_is_a_replica_host_by_host() -> None:
    resolver = _resolver("v5e:4x2")
    strategy = TPUStrategy(resolver)
    devices = list(resolver.get_tpu_system_metadata().devices)
    assert strategy.mesh.devices.ravel().tolist() == devices
    assert strategy.num_replicas_in_sync == 8
    assert strategy.cluster_resolver is resolver


def test_a_copy_is_of_the_same_tpus() -> None:
    resolver = _resolver()
    assignment = DeviceAssignment.build(initialize_tpu_system(resolver), num_replicas=2)
    strategy = TPUStrategy(resolver, assignment, True)
    other = copy.deepcopy(strategy)
    assert other is not strategy
    assert other.cluster_resolver is resolver
    assert other.device_assignment is assignment
    assert other.experimental_spmd_xla_partitioning


def test_cores_that_no_replica_needs_stay_unused() -> None:
    resolver = _resolver()
    assignment = DeviceAssignment.build(initialize_tpu_system(resolver), num_replicas=3)
    strategy = TPUStrategy(resolver, assignment)
    assert strategy.num_replicas_in_sync == 3
    total = strategy.run(
        lambda x: jaxdist.get_replica_context().all_reduce("sum", x), (PerReplica([1, 2, 4]),)
    )
    assert int(total) == 7


def test_an_assignment_for_other_tpus_is_refused() -> None:
    other = DeviceAssignment.build(tpu.slice_of("v5e:2x2").topology)
    with refused(TopologyError, "2x2x1 chips, 1 core", "2x2x1 chips, 2 cores"):
        TPUStrategy(_resolver(), other)
    with refused(ArgumentTypeError, "list", "DeviceAssignment.build"):
        TPUStrategy(_resolver(), [[[0, 0, 0, 0]]])  # type: ignore[arg-type]
    none = DeviceAssignment.build(initialize_tpu_system(_resolver()), num_replicas=0)
    with refused(TopologyError, "0 replicas"):
        TPUStrategy(_resolver(), none)


def test_the_earlier_name_works_and_names_its_successor() -> None:
    resolver = _resolver()
    assignment = DeviceAssignment.build(initialize_tpu_system(resolver), num_replicas=2)
    with pytest.warns(DeprecationWarning, match=r"jaxdist\.TPUStrategy"):
        strategy = jaxdist.experimental.TPUStrategy(resolver, device_assignment=assignment)
    assert isinstance(strategy, TPUStrategy)
    assert strategy.num_replicas_in_sync == 2


def _sum_of_two_layers(strategy: jaxdist.Strategy, rows: np.ndarray) -> tuple[list[float], Any]:
    """The training example of the page, with Flax NNX in place of Keras."""
    with strategy.scope():
        model = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    share = len(rows) // strategy.num_replicas_in_sync

    def dataset_fn(context):
        steps = 6 * context.num_replicas_in_sync
        parts = np.split(rows, context.num_replicas_in_sync)
        for i in range(steps):
            x = parts[i % len(parts)]
            yield x, (x.sum(1) > 2.5).astype("int32")

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))

    def step_fn(model, optimizer, inputs):
        features, labels = inputs
        context = jaxdist.get_replica_context()

        def loss_fn(model):
            logits = model(features)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, context.all_reduce("mean", grads))
        return context.all_reduce("mean", loss)

    losses = [float(strategy.run(step_fn, (model, optimizer, next(iterator)))) for _ in range(6)]
    assert share * strategy.num_replicas_in_sync == len(rows)
    return losses, nnx.state(model)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_training_example_of_the_page_gives_what_one_device_gives(cores: int) -> None:
    resolver = _resolver()
    jaxdist.config.experimental_connect_to_cluster(resolver)
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, [1, 1, 1, cores], num_replicas=8 // cores)
    rows = np.random.default_rng(0).random((16, 5), dtype="float32")
    strategy = TPUStrategy(resolver, experimental_device_assignment=assignment)
    losses, state = _sum_of_two_layers(strategy, rows)
    expected, oracle = _sum_of_two_layers(jaxdist.OneDeviceStrategy("cpu:0"), rows)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, oracle)


def test_the_model_parallel_example_of_the_page_runs_as_written() -> None:
    resolver = _resolver()
    jaxdist.config.experimental_connect_to_cluster(resolver)
    topology = initialize_tpu_system(resolver)
    device_assignment = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=1
    )
    strategy = TPUStrategy(resolver, experimental_device_assignment=device_assignment)

    def dataset_fn(context):
        yield np.ones((2, 4), np.float32), np.zeros((2, 1), np.int32)

    def step_fn(inputs):
        features, _ = inputs
        output = jnp.add(features, features)
        # Add operation will be executed on logical device 0.
        return strategy.experimental_assign_to_logical_device(output, 0)

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dist_dataset)
    batch = next(iterator)
    doubled = strategy.run(step_fn, args=(batch,))
    assert np.asarray(doubled).tolist() == [[2.0] * 4] * 2
    assert len(doubled.sharding.device_set) == 2
    program = strategy.lower(step_fn, (batch,))
    assert [(work.device, work.operations) for work in program.placed] == [(0, 1)]
    assert program.compile().as_text().count(" conditional(") == 1


# In a process of its own: libtpu reads the environment once.
DESCRIBED = """
import jax, numpy as np
import jaxdist
from jaxdist import tpu
from jaxdist._devices import chips
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.tpu.experimental import DeviceAssignment, initialize_tpu_system

NAMES = ["v2:2x2", "v2:4x4", "v3:2x4", "v3:4x4", "v4:2x2x1", "v4:2x2x2", "v5e:1x1", "v5e:1x2",
         "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:4x4*2", "v5p:2x2x1", "v5p:2x4x4", "v5p:4x4x4",
         "v6e:1x1", "v6e:1x8", "v6e:8x8", "v6e:1x1*2", "tpu7x:2x2x1", "tpu7x:2x2x2"]
for name in NAMES:
    ours = tpu.slice_of(name)
    theirs = chips.describe_slice(ours.name, ours.num_slices)
    def told(d):
        slice_index = getattr(d, "slice_index", None) or 0
        return tuple(d.coords), d.core_on_chip, d.process_index, slice_index
    assert [told(c) for c in ours.cores] == [told(d) for d in theirs], name
    if ours.num_slices == 1:
        assert [c.id for c in ours.cores] == [d.id for d in theirs], name
    assert tpu.topology_of(theirs)[0] == ours.topology, name

def step(w, x):
    return w - jaxdist.get_replica_context().all_reduce("mean", w * x.sum())

CASES = [("v4:2x2x2", [1, 1, 1, 2], 8), ("v5e:4x4", None, 16), ("v5e:4x4", [2, 2, 1, 1], 4),
         ("v5p:4x4x4", [1, 1, 4, 1], 16), ("v6e:8x8", None, 64), ("v5e:4x4*2", [4, 1, 1, 1], 8)]
for name, shape, replicas in CASES:
    resolver = TPUClusterResolver("described:" + name)
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, shape, num_replicas=replicas)
    strategy = jaxdist.TPUStrategy(resolver, assignment)
    for r, l in np.ndindex(*strategy.mesh.devices.shape):
        x, y, z, core = assignment.coordinates(r, l)
        device = strategy.mesh.devices[r, l]
        depth = tpu.slice_of(name).shape[2]
        assert (x, y, z % depth, core) == (*device.coords, device.core_on_chip)
        assert (getattr(device, "slice_index", None) or 0) == z // depth
    assert len(set(strategy.extended.worker_devices)) == strategy.mesh.devices.size
    w = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=strategy.replicated_sharding)
    batch = jax.ShapeDtypeStruct((4 * replicas, 4), np.float32,
                                 sharding=strategy.per_replica_sharding)
    found = [c.groups for c in strategy.lower(step, (w, batch)).compile().collectives]
    cores = assignment.num_cores_per_replica
    if "*" not in name:
        # Partition r * cores + l is logical device l of replica r.
        wanted = {frozenset(r * cores + l for r in range(replicas)) for l in range(cores)}
        assert [set(map(frozenset, groups)) for groups in found] == [wanted], (name, found)
        continue
    # Between slices XLA makes an exchange of pairs, by device; within, groups of partitions.
    logical = {d.id: l for (_, l), d in np.ndenumerate(strategy.mesh.devices)}
    [pairs] = [groups for groups in found if min(map(min, groups)) >= 100000]
    assert all(logical[a] == logical[b] and b - a >= 99000 for a, b in pairs), found
    assert sorted(i for pair in pairs for i in pair) == sorted(logical), found
    inside = [groups for groups in found if groups is not pairs]
    assert all(len({i % cores for i in group}) == 1 for groups in inside for group in groups), found
try:
    strategy.run(step, (1.0, np.ones(3)))
except jaxdist.errors.DeviceError as error:
    assert "described:" + name in str(error) and "lower" in str(error)
else:
    raise SystemExit("a description ran a step")
print("all as described")
"""


def test_slices_are_those_that_libtpu_describes_and_steps_compile_for_them() -> None:
    pytest.importorskip("libtpu")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "XLA_FLAGS"))}
    # The worker beside this one may have libtpu open as well.
    environment |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBED],
        env=environment | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as described" in done.stdout
