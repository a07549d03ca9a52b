"""The page of `tf.distribute.TPUStrategy`: its examples and statements.

Changes: `jaxdist` for `tf.distribute`, `'virtual:...'` where there is no TPU, `keras` for
`tf.keras`, `jaxdist.data.batches` for `tf.data`, `jaxdist.function` for `tf.function`, `jax.grad`
for the tape, and `all_reduce` where TensorFlow's optimizer adds up the gradients itself.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import TPUClusterResolver
from tests.ports import find_free_ports
from tests.processes.job import results_of_job
from tests.seeds.programs import find_own_task, make_tf_config


def _make_strategy(tpu: str = "virtual:v5e:2x4") -> jaxdist.TPUStrategy:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver(tpu=tpu)
    jaxdist.config.experimental_connect_to_cluster(resolver)
    jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    return jaxdist.TPUStrategy(resolver)


def _make_parallel(spmd: bool = False) -> jaxdist.TPUStrategy:
    """Run the example with two logical devices and one replica."""
    resolver = jaxdist.cluster_resolver.TPUClusterResolver(tpu="virtual:v4:2x2x1")
    jaxdist.config.experimental_connect_to_cluster(resolver)
    topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=1
    )
    return jaxdist.TPUStrategy(
        resolver,
        experimental_device_assignment=device_assignment,
        experimental_spmd_xla_partitioning=spmd,
    )


def _train(strategy: jaxdist.Strategy, rows: int) -> tuple[list[np.ndarray], int]:
    """Run the custom training loop; return the weights, and how many steps were taken."""
    with strategy.scope():
        with pytest.warns(UserWarning, match="input_shape"):
            layer = keras.layers.Dense(2, input_shape=(5,), kernel_initializer="ones")
        model = keras.Sequential([layer])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)

    def dataset_fn(ctx: Any) -> Any:
        x = np.random.default_rng(0).random((8, 5)).astype(np.float32)
        y = np.random.default_rng(1).integers(2, size=(8, 1))
        return jaxdist.data.batches((x, y), rows, repeat=None, drop_remainder=True)

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dist_dataset)

    @jaxdist.function()
    def train_step(iterator: Any) -> None:
        def step_fn(inputs: Any) -> None:
            features, labels = inputs

            def compute_loss(trainable: Any) -> Any:
                logits, _ = model.stateless_call(trainable, [], features, training=True)
                return keras.losses.sparse_categorical_crossentropy(labels, logits).sum()

            grads = jax.grad(compute_loss)([v.value for v in model.trainable_variables])
            replica = jaxdist.get_replica_context()
            assert replica is not None
            grads = replica.all_reduce("sum", grads)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        strategy.run(step_fn, args=(next(iterator),))

    train_step(iterator)
    train_step(iterator)
    return [np.asarray(v) for v in model.trainable_variables], int(optimizer.iterations.value)


def test_the_signature_is_that_of_the_page() -> None:
    found = inspect.signature(jaxdist.TPUStrategy).parameters
    assert [(name, p.default) for name, p in found.items()][:3] == [
        ("tpu_cluster_resolver", None),
        ("experimental_device_assignment", None),
        ("experimental_spmd_xla_partitioning", False),
    ]
    assert issubclass(jaxdist.TPUStrategy, jaxdist.Strategy)


def test_the_example_that_makes_a_strategy_has_a_replica_on_each_core() -> None:
    strategy = _make_strategy()
    assert strategy.num_replicas_in_sync == 8


def test_without_a_resolver_it_is_the_tpu_of_this_machine_or_an_error_that_says_what_to_pass() -> (
    None
):
    # Tests run on CPUs, also where the machine has a TPU.
    with pytest.raises(
        jaxdist.errors.NotFoundError, match=r"tpu_cluster_resolver=None[^!]*virtual"
    ):
        jaxdist.TPUStrategy()


def test_attributes_of_the_page() -> None:
    strategy = _make_strategy()
    assert isinstance(strategy.cluster_resolver, TPUClusterResolver)
    assert isinstance(strategy.extended, jaxdist.StrategyExtended)
    assert jaxdist.MirroredStrategy().cluster_resolver is None
    assert jaxdist.OneDeviceStrategy("cpu:0").cluster_resolver is None


def test_the_example_of_cluster_resolver_takes_the_branch_of_a_worker() -> None:
    ports = find_free_ports(3)
    found = results_of_job(find_own_task, 2, env=lambda n: make_tf_config(ports, n), service=False)
    assert [(f["branch"], f["task"], f["replicas"]) for f in found] == [
        ("worker", 0, 2),
        ("worker", 1, 2),
    ]
    assert found[0]["cluster"]["ps"] == [f"localhost:{ports[2]}"]


def test_variables_of_the_scope_are_on_all_replicas_and_kept_in_sync() -> None:
    strategy = _make_strategy()
    with strategy.scope():
        v = jaxdist.Variable(1.0, aggregation=jaxdist.VariableAggregation.SUM)
    copies = strategy.experimental_local_results(v)
    assert len(copies) == 8
    ids = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    strategy.run(lambda x: v.assign_add(x), (ids,))
    assert [float(np.asarray(c)) for c in strategy.experimental_local_results(v)] == [29.0] * 8


def test_the_custom_training_loop_trains_as_one_device_does() -> None:
    found, steps = _train(_make_strategy(), 1)
    expected, _ = _train(jaxdist.OneDeviceStrategy("cpu:0"), 8)
    assert steps == 2
    assert np.abs(found[0] - 1).max() > 1e-3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_global_dataset_is_distributed_too() -> None:
    strategy = _make_strategy()
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    dataset = strategy.experimental_distribute_dataset(jaxdist.data.batches(x, 8))
    sums = [strategy.run(lambda x: x.sum(), (batch,)) for batch in dataset]
    totals = [float(strategy.reduce("sum", s, axis=None)) for s in sums]
    assert totals == [x[:8].sum(), x[8:].sum()]


def test_compile_and_fit_distribute_by_themselves() -> None:
    strategy = _make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = np.ones((20, 5), "float32"), np.zeros((20, 2), "float32")
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert history.history["loss"][2] < history.history["loss"][0]


def test_a_function_that_is_no_jaxdist_function_is_compiled_by_run() -> None:
    strategy = _make_strategy()
    traced: list[int] = []

    def step(x: Any) -> Any:
        traced.append(1)
        return x + 1

    for _ in range(3):
        strategy.run(step, (np.float32(1),))
    assert len(traced) == 1


def test_an_assignment_says_how_many_replicas_and_logical_devices_there_are() -> None:
    strategy = _make_parallel()
    assert strategy.num_replicas_in_sync == 1
    assert dict(strategy.mesh.shape) == {"replica": 1, "logical": 2}


def test_the_example_runs_an_addition_on_logical_device_0_alone() -> None:
    strategy = _make_parallel()

    def dataset_fn(ctx: Any) -> Any:
        x = np.random.default_rng(0).random((2, 5)).astype(np.float32)
        y = np.random.default_rng(0).integers(2, size=(2, 1))
        return jaxdist.data.batches((x, y), 1, repeat=None, drop_remainder=True)

    @jaxdist.function()
    def step_fn(inputs: Any) -> Any:
        features, _ = inputs
        output = jnp.add(features, features)
        # Add operation will be executed on logical device 0.
        return strategy.experimental_assign_to_logical_device(output, 0)

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dist_dataset)
    batch = next(iterator)
    output = strategy.run(step_fn, args=(batch,))
    np.testing.assert_allclose(output, 2 * np.asarray(batch[0]))
    placed = strategy.lower(step_fn, (batch,)).placed
    assert [(work.device, work.operations) for work in placed] == [(0, 1)]


def test_with_spmd_partitioning_inputs_are_split_or_replicated_and_assigning_is_an_error() -> None:
    strategy = _make_parallel(spmd=True)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    def multiply(x: Any, w: Any) -> Any:
        x = strategy.experimental_split_to_logical_devices(x, [1, 2])
        w = strategy.experimental_replicate_to_logical_devices(w)
        return x @ w

    np.testing.assert_allclose(strategy.run(multiply, (x, x.T)), x @ x.T)
    with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning"):
        strategy.run(lambda x: strategy.experimental_assign_to_logical_device(x, 0), (x,))
