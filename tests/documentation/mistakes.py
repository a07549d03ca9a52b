"""Programs with the mistakes of `docs/troubleshooting.md`, which raise what the page quotes.

Each function has the name of its class of error and a few words. What takes several processes or
another machine has no function: its words are looked for in the source.
"""

import dataclasses
import importlib
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import partition
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.jobs import load_job_config
from jaxdist.training import Checkpoints

Mistake = Callable[[jaxdist.Strategy, pathlib.Path], object]


def _rows(strategy: jaxdist.Strategy, rows: int = 16) -> jax.Array:
    return jax.device_put(np.ones(rows, np.float32), strategy.per_replica_sharding)


def _sum(x: jax.Array) -> jax.Array:
    return jaxdist.get_replica_context().all_reduce("sum", x)


def leave_gradients_alone(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    with strategy.scope():
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda model: model(x[:, None]).sum())(model))

    strategy.run(step, (model, optimizer, _rows(strategy)))


def _fit_keras(strategy: jaxdist.Strategy, call: Callable[[Any, Any], Any]) -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras: Any = importlib.import_module("keras")

    class Layer(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            call(self, x)
            return x

    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((1,)), Layer(), dense])
        model.compile("sgd", "mse")
    ones = np.ones((8, 1), np.float32)
    model.fit(ones, ones, batch_size=8, verbose=0)


def keep_state_in_a_layer_of_keras(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    _fit_keras(strategy, lambda layer, x: layer.largest.assign(jnp.max(x)))


def add_a_loss_that_counts_rows_in_python(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    def add(layer: Any, x: Any) -> None:
        layer.add_loss(jnp.sum(x) if x.shape[0] == 8 else jnp.max(x) ** 2)

    _fit_keras(strategy, add)


def sum_in_a_branch(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0] > 0, lambda: _sum(x), lambda: x)

    strategy.run(step, (_rows(strategy),))


def take_a_mean_of_no_rows(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jaxdist.get_replica_context().all_reduce("mean", x.mean())

    data = strategy.experimental_distribute_dataset([np.ones(3, np.float32)])
    strategy.run(step, (next(iter(data)),))


def divide_by_the_rows_of_one_replica(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        return _sum(jaxdist.nn.compute_average_loss(x))

    data = strategy.experimental_distribute_dataset([np.ones(15, np.float32)])
    strategy.run(step, (next(iter(data)),))


def make_a_function_in_each_step(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    x = _rows(strategy)
    for offset in range(4):
        strategy.run(lambda v, offset=offset: v + offset, (x,))


def ask_for_devices_late(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    jaxdist.testing.virtual_devices(3)


def branch_on_a_traced_value(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        return x if x[0] > 0 else -x

    strategy.run(step, (_rows(strategy),))


def use_a_traced_size(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    strategy.run(lambda rows: jnp.zeros(rows), (3,))


def keep_a_traced_value(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    kept = []
    strategy.run(lambda x: kept.append(x * 2), (_rows(strategy),))
    kept[0] + 1


def clip_pieces_of_parameters(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    partition.place(strategy, (model, optimizer), partition.fsdp(min_bytes=0))

    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array) -> None:
        grads = nnx.grad(lambda model: model(x).mean())(model)
        optimizer.update(model, jaxdist.get_replica_context().all_reduce("mean", grads))

    strategy.run(step, (model, optimizer, _rows(strategy, 16).reshape(4, 4)))


def reduce_in_a_step(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    strategy.run(lambda x: strategy.reduce("sum", x, axis=None), (_rows(strategy),))


def make_a_variable_in_a_step(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    strategy.run(lambda: jaxdist.Variable(0.0))


def all_reduce_in_a_scope(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    with strategy.scope():
        jaxdist.get_replica_context().all_reduce("sum", 1.0)


def sum_a_number(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    strategy.reduce("sum", 3.0, axis=None)


def use_donated_state(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    state = jax.device_put(np.zeros(8, np.float32), strategy.replicated_sharding)
    options = jaxdist.RunOptions(donate_argnums=(0,))
    for _step in range(2):
        strategy.run(lambda state: state + 1, (state,), options=options)


def split_images_and_labels(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    batch = {"image": np.zeros((16, 2)), "label": np.zeros(8)}
    next(iter(strategy.experimental_distribute_dataset([batch])))


class _Model:
    def __init__(self) -> None:
        self.weight = jnp.ones(3)


def pass_an_object_with_arrays(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    strategy.run(lambda model: model.weight.sum(), (_Model(),))


def write_a_model_of_the_closure(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step() -> None:
        model.kernel[...] = model.kernel[...] + 1

    strategy.run(step)


def shard_what_does_not_divide(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    rules = partition.Rules([("w", partition.Shard(0))])
    partition.place(strategy, {"w": jnp.zeros((10, 3))}, rules)


def name_a_device_that_is_not_there(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    jaxdist.MirroredStrategy(["gpu:0", "gpu:1"])


def look_for_a_tpu(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    jaxdist.tpu.experimental.initialize_tpu_system(jaxdist.cluster_resolver.TPUClusterResolver(""))


def plan_for_gpus_without_hosts(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    jaxdist.MirroredStrategy("described:h100:32")


def plan_for_too_many_gpus_of_a_host(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    jaxdist.MirroredStrategy("described:h100:1x16")


def describe_gpus_without_the_plugin(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    with mock.patch("jaxdist._compat.find_cuda_plugin", return_value=None):
        jaxdist.MirroredStrategy("described:h100:1x7")


def describe_gpus_with_an_old_plugin(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    with (
        mock.patch("jaxdist._compat.find_cuda_plugin", return_value="xla_cuda13"),
        mock.patch("importlib.metadata.version", return_value="0.1"),
    ):
        jaxdist.MirroredStrategy("described:h100:1x7")


def run_on_a_description(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    layout = dataclasses.replace(strategy.layout, described="described:h100:1x4")
    strategy._on(layout).run(lambda: 1.0)


def misspell_the_memory_fraction(strategy: jaxdist.Strategy, _: pathlib.Path) -> None:
    with mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "90%"}):
        strategy.lower(lambda x: x + 1, (1.0,)).compile_for("h100:1x8")


def restore_another_model(_: jaxdist.Strategy, folder: pathlib.Path) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(3)})
        checkpoints.restore({"w": jnp.zeros(4)})


def fit_again_into_a_folder(strategy: jaxdist.Strategy, folder: pathlib.Path) -> None:
    x = np.ones((8, 1), np.float32)
    for seed in range(2):
        model = jaxdist.fit.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(seed)), strategy)
        model.compile("sgd", "mse")
        model.fit(x, x, verbose=0, callbacks=[jaxdist.fit.ModelCheckpoint(folder)])


def damage_a_checkpoint(_: jaxdist.Strategy, folder: pathlib.Path) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(1000.0)})
        checkpoints.wait_until_finished()
        largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-10])
        checkpoints.restore({"w": jnp.zeros(1000)})


def read_a_name_of_tensorflow(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    getattr(jaxdist, "Exponential" + "MovingAverage")


def misspell_a_key(_: jaxdist.Strategy, folder: pathlib.Path) -> None:
    file = folder / "job.toml"
    file.write_text('task = "digits"\n[training]\nstep = 3\n')
    load_job_config(file)


def misspell_tf_config(_: jaxdist.Strategy, __: pathlib.Path) -> None:
    TFConfigClusterResolver(environ={"TF_CONFIG": "{'cluster': {}}"}).cluster_spec()


MISTAKES: dict[str, Mistake] = {
    name: value
    for name, value in list(globals().items())
    if not name.startswith("_") and getattr(value, "__module__", "") == __name__
}


def provoke(name: str, strategy: jaxdist.Strategy, folder: pathlib.Path) -> str:
    """Return the class of what a mistake raises, and the first line of its message."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            MISTAKES[name](strategy, folder)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"
