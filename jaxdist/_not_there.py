"""Documented names that jaxdist does not have, and the replacement of each.

Reading one raises `errors.MissingNameError`, an `AttributeError`, so `hasattr` returns False.
Importing one (`import jaxdist.keras`, `from jaxdist import keras`) raises
`errors.MissingModuleError`, an `ImportError`.
"""

import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from typing import Any

from jaxdist.errors import MissingModuleError, MissingNameError

# Sentences that several of the errors below share.

_SESSIONS = "There are no sessions and no graphs: steps run when they are called."
_RUN = "A step is a function that strategy.run(step, args) runs on every replica."

_TOP = {
    "CentralStorageStrategy": "It is jaxdist.experimental.CentralStorageStrategy.",
    "distribute": (
        "The names of tf.distribute are those of jaxdist itself: tf.distribute.MirroredStrategy is "
        "jaxdist.MirroredStrategy, and tf.distribute.experimental is jaxdist.experimental."
    ),
    "ExponentialMovingAverage": (
        "optax has it: optax.ema as a transformation, or "
        "optax.incremental_update(new, average, step_size=1 - decay) in the step.\n\n"
        "All-reduce first what differs between replicas: "
        "get_replica_context().all_reduce('mean', value)."
    ),
    "StrategyV1": "It is jaxdist.compat.v1.Strategy.",
    "experimental_aggregate_gradients": (
        "Optimizers are optax's, which never all-reduce: a step all-reduces its gradients in a "
        "line of its own, and leaves that line out for experimental_aggregate_gradients=False."
    ),
    "lookup": (
        "There are no lookup tables: arrays hold numbers, not strings.\n\n"
        "Look keys up in the dataset, with a dict or numpy.searchsorted. A table from integers to "
        "numbers that workers read is a jaxdist.Variable in the scope, and rows of it are "
        "jaxdist.nn.embedding_lookup(table, ids)."
    ),
    "keras": (
        "jaxdist has no Keras of its own: import keras, with the environment variable "
        "KERAS_BACKEND=jax, and make and compile the model in strategy.scope().\n\n"
        "For a Flax NNX module, jaxdist.fit.Model has compile, fit, evaluate and predict."
    ),
    "get_loss_reduction": "It is jaxdist.compat.v1.get_loss_reduction.",
}
_STEP = f"It differentiates a loss with respect to variables that it finds by itself.\n\n{_RUN}"
_CONTRIB = {
    "CollectiveAllReduceStrategy": (
        "It gave each batch of a dataset whole to one replica.\n\n"
        "Use jaxdist.MultiWorkerMirroredStrategy(), and "
        "distribute_datasets_from_function(lambda context: dataset) for a dataset whose batches "
        "are those of one replica. num_gpus_per_worker=n is CUDA_VISIBLE_DEVICES with n numbers."
    ),
    "MirroredStrategy": (
        "It gave each batch of a dataset whole to one replica.\n\n"
        "Use jaxdist.MirroredStrategy(devices, cross_device_ops), and "
        "distribute_datasets_from_function(lambda context: dataset) for a dataset whose batches "
        "are those of one replica. num_gpus=n is devices=['gpu:0', ...]."
    ),
    "ParameterServerStrategy": (
        "It gave each batch of a dataset whole to one replica.\n\n"
        "Use jaxdist.compat.v1.experimental.ParameterServerStrategy(resolver), and "
        "distribute_datasets_from_function(lambda context: dataset) for a dataset whose batches "
        "are those of one replica. num_gpus_per_worker=n is num_accelerators={'GPU': n} of a "
        "SimpleClusterResolver."
    ),
    "StandardInputStep": _STEP,
    "StandardSingleLossStep": (
        f"{_STEP}\n\nWrite value_and_grad, an all-reduce and the optimizer in it."
    ),
    "Step": _STEP,
    "TPUStrategy": (
        "It is jaxdist.TPUStrategy(resolver); steps_per_run is how often fit returns to the "
        "host, and jaxdist.multi_step runs several steps in one dispatch."
    ),
    "UpdateContext": (
        "A function that extended.update calls has no replica context: variables are the "
        "copies of the replica, and get_replica_context() is None."
    ),
    "run_standard_tensorflow_server": "It is jaxdist.Server(cluster_spec, job_name, task_index).",
}
_TPU_V1 = {
    "CrossShardOptimizer": (
        "Optimizers are optax's: all-reduce the gradients before optimizer.update, "
        "get_replica_context().all_reduce('mean', grads)."
    ),
    "PaddingSpec": "Shapes are static: InputOptions(partial_batch=PartialBatch.PAD) pads batches.",
    "batch_parallel": f"{_RUN}\n\nBatches are split by experimental_distribute_dataset.",
    "bfloat16_scope": "Cast in the step: x.astype(jnp.bfloat16); Flax modules take dtype=.",
    "core": "It is TPUStrategy.experimental_assign_to_logical_device, or on_logical_device.",
    "cross_replica_sum": "It is get_replica_context().all_reduce('sum', x).",
    "initialize_system": "It is tpu.experimental.initialize_tpu_system(resolver).",
    "outside_compilation": "jax.pure_callback and jax.debug.callback call the host from a step.",
    "replicate": _RUN,
    "rewrite": f"jaxdist.function(fn) compiles a function as a whole.\n\n{_RUN}",
    "shard": f"{_RUN}\n\nAn array laid out as strategy.per_replica_sharding is split over them.",
    "shutdown_system": "It is tpu.experimental.shutdown_tpu_system(resolver).",
}
# Version 1 of `tf.distribute` lacks these names, so `compat.v1` leaves them out on purpose.
_NAMES_OF_V2 = (
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputOptions",
    "TPUStrategy",
)
_ONLY_V2 = "Version 1 of tf.distribute has no {0} here; it is jaxdist.{0}."
# Module -> documented name -> the error message.
MISSING: dict[str, dict[str, str]] = {
    "jaxdist": _TOP,
    "jaxdist.contrib": _CONTRIB,
    "jaxdist.errors": {
        "AbortedError": (
            "A lost worker is errors.WorkerUnavailableError, and a server that does not answer, or "
            "that has lost its variables, is errors.PSUnavailableError."
        ),
        "FailedPreconditionError": (
            "A call at the wrong time or place raises errors.ContextError, a RuntimeError."
        ),
    },
    "jaxdist.cluster_resolver": {
        "SageMakerClusterResolver": (
            "TensorFlow does not export it either.\n\nUse SimpleClusterResolver."
        ),
    },
    "jaxdist.tpu.experimental": {
        "embedding": (
            "Tables are parameters: jnp.take(table, ids, axis=0), in pieces over the devices by "
            "partition rules (partition.fsdp()).\n\n"
            "Tables on servers are variables of a ParameterServerStrategy with a "
            "variable_partitioner."
        ),
    },
    "jaxdist.compat.v1": {
        **{name: _ONLY_V2.format(name) for name in _NAMES_OF_V2},
        "MultiWorkerMirroredStrategy": (
            "It is jaxdist.compat.v1.experimental.MultiWorkerMirroredStrategy."
        ),
        "ParameterServerStrategy": (
            "It is jaxdist.compat.v1.experimental.ParameterServerStrategy."
        ),
    },
    "jaxdist.compat.v1.tpu": _TPU_V1,
}
_LOGICAL = "TPUStrategy has it: a replica of another strategy spans the other axes of its mesh."
_METHODS_OF_TF_DATA = (
    "cache",
    "enumerate",
    "filter",
    "interleave",
    "map",
    "prefetch",
    "repeat",
    "shuffle",
    "skip",
    "take",
    "unbatch",
    "zip",
)
_TRANSFORMED = (
    "It is not a tf.data dataset: write examples.batch(size, shuffle=True, seed=0, repeat=epochs)."
    "\n\nTo map or filter use Grain, whose datasets experimental_distribute_dataset takes."
)
# Class -> documented method or property -> the error message.
MISSING_MEMBERS: dict[str, dict[str, str]] = {
    "Examples": dict.fromkeys(_METHODS_OF_TF_DATA, _TRANSFORMED),
    "Strategy": {
        "configure": (
            f"{_SESSIONS}\n\nDevices, options and processes are arguments of the strategy, and "
            "config.experimental_connect_to_cluster joins processes."
        ),
        "experimental_assign_to_logical_device": _LOGICAL,
        "experimental_replicate_to_logical_devices": _LOGICAL,
        "experimental_split_to_logical_devices": _LOGICAL,
        "steps_per_run": "compat.v1.experimental.TPUStrategy has it.",
        "update_config_proto": (
            f"{_SESSIONS}\n\nOptions of XLA are in the environment variable XLA_FLAGS."
        ),
    },
}


def explain_missing(module: str) -> None:
    """Give a module a `__getattr__` that explains its missing documented names."""
    table = MISSING[module]
    has = vars(sys.modules[module])
    read_late = has.get("__getattr__")

    def read(name: str) -> Any:
        if read_late is None or name in table:
            raise _make_error(module, name, table, None)
        return read_late(name)

    # Set by name, not by `def`: a type checker accepts every name of a module that defines it.
    has["__getattr__"] = read
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    """The last import finder, which Python calls for modules that no other finder has found.

    `from module import name` calls it too, if the module has no such attribute.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        module, _, name = fullname.rpartition(".")
        table = MISSING.get(module, {})
        if name in table:
            # Without `name=`: in `from module import name`, Python ignores an error that has it.
            raise MissingModuleError(f"{module}.{name} does not exist.\n\n{table[name]}")


def missing_member(owner: Any, name: str, table: Mapping[str, str]) -> AttributeError:
    """Return the error for a member that an object does not have."""
    return _make_error(type(owner).__name__, name, table, owner)


def _make_error(where: str, name: str, table: Mapping[str, str], owner: Any) -> AttributeError:
    if name in table:
        text = f"{where}.{name} does not exist.\n\n{table[name]}"
        return MissingNameError(text, name=name, obj=owner)
    # For names that are not documented, the message that Python itself would use.
    found = f"module {where!r}" if owner is None else f"{where!r} object"
    return AttributeError(f"{found} has no attribute {name!r}", name=name, obj=owner)


# `errors` is imported by this module, and so cannot call it.
explain_missing("jaxdist.errors")
