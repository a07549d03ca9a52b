"""Refuses Keras models that parameter servers cannot train."""

from typing import Any

from jaxdist._keras import find_aggregations, has_own, keras_module, name_of
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
            "It returns new weights, which were computed from values that are old when they come "
            "to the servers: they would overwrite the updates of other workers.\n\n"
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
            "A server updates each variable by itself, when its gradient comes.\n\n"
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
            "Workers of parameter servers send what a step has added to state, which is known of "
            "the call of the model only.\n\n"
            "Assign it in the call of the layer."
        )
