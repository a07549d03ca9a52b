"""Refuses Keras models that servers cannot train, and finds which variables they add up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._keras import (
    OnlyReplica,
    Rows,
    count_rows,
    find_aggregations,
    has_own,
    keras_module,
    name_of,
    use_rows,
)
from jaxdist._program import Dependence, growth, is_weighted_sum
from jaxdist.errors import UnsupportedError


def check_model(model: Any, kind: str, strategy: Any) -> None:
    """Check that workers that run independently can run the steps of a model.

    Args:
        model: The compiled model.
        kind: "train" or "test".
        strategy: Its strategy.

    Raises:
        UnsupportedError: It has its own `train_step`, an optimizer that scales the loss, or is set
            to run op by op.
    """
    method = {"train": "fit", "test": "evaluate"}[kind]
    called = f"{method} of the Keras model {name_of(model)!r} on a {type(strategy).__name__}"
    if model.run_eagerly or not model.jit_compile:
        option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
        raise UnsupportedError(
            f"{called} was called, and the model was compiled with {option}.\n\n"
            "Workers of parameter servers run compiled programs of the steps.\n\n"
            "Leave it out in compile, or debug the model on jaxdist.OneDeviceStrategy()."
        )
    if kind == "test":
        return
    if has_own(model, "train_step"):
        raise UnsupportedError(
            f"{called} was called, and {type(model).__name__} has a train_step of its own.\n\n"
            "It returns new weights, which were computed from values that are old when they reach "
            "the servers: they would overwrite the updates of other workers.\n\n"
            "Override compute_loss instead of train_step; or write the step with "
            "model.stateless_call and coordinator.ServerOptimizer, and schedule it."
        )
    _check_optimizer(model.optimizer, called)


def _check_optimizer(optimizer: Any, called: str) -> None:
    base = keras_module("optimizers.base_optimizer").BaseOptimizer
    if type(optimizer).scale_loss is not base.scale_loss:
        raise UnsupportedError(
            f"{called} was called, and its optimizer is a {type(optimizer).__name__}, which "
            "chooses the scale of the loss by the gradients of all variables.\n\n"
            "A server updates each variable on its own, when its gradient arrives.\n\n"
            "Use the dtype policy mixed_bfloat16, which needs no scaling; or pass "
            "auto_scale_loss=False to compile, and loss_scale_factor=1024 to the optimizer."
        )
    if optimizer.gradient_accumulation_steps and optimizer.global_clipnorm:
        raise UnsupportedError(
            f"{called} was called, and its optimizer has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} and global_clipnorm="
            f"{optimizer.global_clipnorm}.\n\n"
            "Each server accumulates the gradients of its variables, and the global norm of the "
            "sums needs those of all.\n\n"
            "Use clipnorm or clipvalue, or larger batches without accumulation."
        )


def check_added_up(model: Any, changed: list[Any]) -> None:
    """Check that the changes of metrics by `compute_loss` can be added up over the steps.

    Args:
        model: The model.
        changed: The variables of metrics that it changed.

    Raises:
        UnsupportedError: A variable belongs to a metric that is not a sum or mean.
    """
    module = keras_module("metrics")
    sums = (module.Mean, module.Sum)
    of_sums = {id(v) for m in model.metrics if type(m) in sums for v in m.variables}
    strange = [v.path for v in changed if id(v) not in of_sums]
    if strange:
        raise UnsupportedError(
            f"compute_loss of the Keras model {name_of(model)!r} changes the metric variables "
            f"{strange}.\n\n"
            "A worker of parameter servers computes what its rows add to a metric, and does not "
            "know what other workers have added. Only sums can be added up.\n\n"
            "Use keras.metrics.Mean or Sum there, or update the metric in compute_metrics, which "
            "runs on the coordinator."
        )


def check_state_of_loss(model: Any, numbers: frozenset[int]) -> None:
    """Check that `compute_loss` assigns no state of the user's own layers.

    Args:
        model: The model.
        numbers: The numbers of the variables that it assigned.

    Raises:
        UnsupportedError: It assigns such state.
    """
    own = find_aggregations(model)
    paths = [model.non_trainable_variables[n].path for n in sorted(numbers) if n in own]
    if paths:
        raise UnsupportedError(
            f"compute_loss of the Keras model {name_of(model)!r} assigns state of own layers: "
            f"{paths}.\n\n"
            "Workers of parameter servers send what a step has added to state, which is known only "
            "for the call of the model.\n\n"
            "Assign it in the call of the layer."
        )


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """The numbers of variables whose next value depends on the previous one.

    Args:
        numbers: The numbers of all these variables.
        added: The float variables among them that a step only adds to.
    """

    numbers: frozenset[int]
    added: frozenset[int]


UNKNOWN = Accumulated(frozenset(), frozenset())


def find_accumulated(
    strategy: Any, model: Any, state: Any, batch: Any, *, training: bool
) -> Accumulated:
    """Return the variables whose next value depends on the previous one.

    A moving average does, but a value that a layer only records does not. This traces a call of
    the model once, and computes nothing.

    Args:
        strategy: The strategy of the model.
        model: The model.
        state: The values of its variables: the trainable ones, then the others.
        batch: A batch of Keras.
        training: Whether the model is called for training.

    Raises:
        UnsupportedError: A layer of the user changes such a variable other than by adding to it,
            and the variable is not an average.
    """
    utils = keras_module("trainers.data_adapters.data_adapter_utils")
    x, _, _ = utils.unpack_x_y_sample_weight(batch)
    kwargs = {"training": training} if model._call_has_training_arg else {}

    def call(fixed: Any, trainable: Any, x: Any) -> list[Any]:
        _, after = model.stateless_call(trainable, fixed, x, **kwargs)
        return list(after)

    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)),
        (list(state[1]), list(state[0]), x),
    )
    count = count_rows(batch)
    with use_rows(Rows(count, count, OnlyReplica(strategy), has_shares=False)):
        closed = jax.make_jaxpr(call)(*shapes)
    numbers = range(len(state[1]))
    found = frozenset(n for n in numbers if n in _compat.drop_unused(closed, [n])[1])
    _check_can_be_added_up(model, closed.jaxpr, found)
    variables = model.non_trainable_variables
    floats = [n for n in found if jnp.issubdtype(variables[n].dtype, jnp.inexact)]
    jaxpr = closed.jaxpr
    added = [n for n in floats if growth(jaxpr, jaxpr.invars[n], n) is Dependence.SUM]
    return Accumulated(found, frozenset(added))


def _check_can_be_added_up(model: Any, jaxpr: Any, numbers: frozenset[int]) -> None:
    # Workers send the change of a variable. If two workers read the same value and compute a
    # maximum, their changes do not add up to the change of the maximum.
    aggregations = find_aggregations(model)
    strange = [
        model.non_trainable_variables[n].path
        for n in sorted(numbers)
        if n in aggregations and not _adds_up(jaxpr, n, aggregations[n])
    ]
    if strange:
        raise UnsupportedError(
            f"The Keras model {name_of(model)!r} is on parameter servers, and layers of its own "
            f"compute the new value of {strange} from the old one in another way than by adding "
            "to it.\n\n"
            "Workers read the same old value and send by how much it has changed, so the changes "
            "of all workers must add up.\n\n"
            "Assign only a value that does not depend on the old one, or add to it: "
            "variable.assign_add(more). Pass aggregation='mean' to add_weight for a moving "
            "average, decay * old + (1 - decay) * value. Or train on a strategy whose replicas are "
            "in step, such as MirroredStrategy."
        )


def _adds_up(jaxpr: Any, number: int, aggregation: str) -> bool:
    grown = growth(jaxpr, jaxpr.invars[number], number)
    if grown is not Dependence.OTHER or aggregation != "mean":
        return grown is not Dependence.OTHER
    return is_weighted_sum(jaxpr, number, number)
