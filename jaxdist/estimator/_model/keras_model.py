"""Makes a model function from a Keras model, its optimizer and its metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import _keras_servers
from jaxdist._called import called, refuse
from jaxdist._keras import Rows, compute_loss, keras_module, use_rows
from jaxdist._strategies import get_replica_context
from jaxdist.errors import ArgumentError, ShapeError, UnsupportedError
from jaxdist.estimator._model.building import get_module
from jaxdist.estimator._model.spec import EstimatorSpec, ModeKeys, take_mean_of_rows

_CALLER = "estimator.Estimator"

# Note [Keras models of an Estimator]
# The variables of a Keras model become those of an NNX module, and its calls are `stateless_call`.
# So checkpoints, replicas and parameter servers treat it as any other module. Its names have a
# number, since Keras gives the layers of a second model other names.


def is_keras_object(given: Any) -> bool:
    """Whether a value is of a class of Keras, which need not be imported."""
    return any(kind.__module__.split(".")[0] == "keras" for kind in type(given).__mro__)


def check_keras_model(model: Any) -> None:
    """Check that a Keras object is a model that JAX can call as a pure function.

    Raises:
        ArgumentError: The object is not a Keras model.
        UnsupportedError: Keras uses another backend, or keeps its variables in Flax.
    """
    if not isinstance(model, keras_module("models.model").Model):
        raise refuse(
            f"a {type(model).__name__} of Keras as model_fn.",
            "A Keras model is a keras.Model, such as keras.Sequential.",
            "Pass keras.Sequential([keras.Input(shape), layer]).",
        )
    config = keras_module("backend.config")
    if config.backend() != "jax" or config.is_nnx_enabled():
        found = "KERAS_NNX_ENABLED" if config.backend() == "jax" else repr(config.backend())
        raise refuse(
            f"the Keras model {model.name!r}, and Keras uses {found}.",
            "Strategies of jaxdist train models of the JAX backend. Keras reads its backend once, "
            "when it is imported.",
            "Start the program with KERAS_BACKEND=jax, and KERAS_NNX_ENABLED=false.",
            kind=UnsupportedError,
        )


class _Values(nnx.Module):
    """The values of the variables of a Keras model."""

    def __init__(self, model: Any) -> None:
        trainable, fixed = model.trainable_variables, model.non_trainable_variables
        self.trainable = nnx.Dict({n: nnx.Param(x) for n, x in _name(trainable).items()})
        self.fixed = nnx.Dict({n: nnx.BatchStat(x) for n, x in _name(fixed).items()})


def _name(variables: Sequence[Any]) -> dict[str, Any]:
    # Copies: a step may delete the arrays that it gets.
    return {f"{n:04d}_{v.name}": jnp.array(np.asarray(v.value)) for n, v in enumerate(variables)}


def make_from_keras(
    model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, Any] | None
) -> Callable[..., EstimatorSpec]:
    """Return a model function of five arguments.

    Args:
        model: The Keras model.
        loss: A loss of predictions and labels; None for that of `compile`.
        optimizer: An optax transformation; None for that of `compile`.
        metrics: Metrics by name, with `loss`.
    """

    def call(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        del params, config
        shapes = jax.tree.map(_take_shape, (features, labels))
        values = get_module(lambda rngs: _build(model, mode, *shapes, is_own=loss is None))
        trainable = [v[...] for _, v in sorted(values.trainable.items())]
        fixed = [v[...] for _, v in sorted(values.fixed.items())]
        training = {"training": mode == ModeKeys.TRAIN} if model._call_has_training_arg else {}
        rows = jax.tree.leaves(features)[0].shape[0]
        with _use_replica(mode, rows):
            found = model.stateless_call(trainable, fixed, features, return_losses=True, **training)
        predictions, after, added = found
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        if labels is None:
            raise ArgumentError(
                f"{_CALLER}: input_fn yields features without labels.\n\n"
                "The loss of a Keras model needs both.\n\n"
                "Let the dataset of input_fn yield pairs (features, labels)."
            )
        is_train = mode == ModeKeys.TRAIN
        if is_train:
            _write_fixed(values, fixed, after)
        if loss is not None:
            own = {name: metric(predictions, labels) for name, metric in (metrics or {}).items()}
            of_rows = take_mean_of_rows(loss(predictions, labels)) + sum(added)
            return EstimatorSpec(
                mode, predictions, of_rows, train_op=optimizer, eval_metric_ops=own
            )
        with _use_replica(mode, rows):
            counts = [jnp.zeros(v.shape, v.dtype) for v in model.metrics_variables]
            held, data = (trainable, after, counts), (features, labels, predictions, None)
            # The mean over the rows, plus the losses of the layers.
            total, _, _ = compute_loss(model, held, data, added, is_train)
        return EstimatorSpec(
            mode,
            predictions,
            total,
            train_op=make_transformation(model.optimizer) if is_train else None,
            eval_metric_ops=None if is_train else compute_metrics(model, labels, predictions),
        )

    return call


@called(_CALLER)
def _build(model: Any, mode: str, features: Any, labels: Any, *, is_own: bool) -> _Values:
    """Make what Keras makes at the first batch, and return the values of all variables."""
    if is_own and mode != ModeKeys.PREDICT and labels is not None:
        model._symbolic_build(data_batch=(features, labels))
        check_metrics(model)
    elif not all(layer.built for layer in model._flatten_layers()):
        backend = keras_module("backend")
        make = lambda s: backend.KerasTensor(s.shape, str(s.dtype))  # noqa: E731
        backend.compute_output_spec(model, jax.tree.map(make, features), training=False)
    _check_layers(model)
    if not model.variables:
        raise refuse(
            f"the Keras model {model.name!r}, which has no variables.",
            "There is nothing to train.",
            "Add a layer with weights, such as keras.layers.Dense(1).",
            kind=ShapeError,
        )
    return _Values(model)


def _check_layers(model: Any) -> None:
    """Refuse layers with statistics over the rows of all replicas: batches may differ in size."""
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise refuse(
                f"the Keras model {model.name!r}, whose layer {layer.name!r} has "
                "synchronized=True.",
                "The replicas of an Estimator have batches of their own, and each normalizes with "
                "its own statistics.",
                "Leave synchronized out, or train the model with its own fit in the strategy's "
                "scope.",
                kind=UnsupportedError,
            )


def _take_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _use_replica(mode: str, rows: int) -> Any:
    """Let Keras layers draw different random numbers in each replica, as `fit` of Keras does."""
    replica = get_replica_context()
    if mode != ModeKeys.TRAIN or replica is None:
        return use_rows(None)
    total = rows * replica.num_replicas_in_sync
    return use_rows(Rows(rows, total, replica, has_shares=False))


def _write_fixed(values: _Values, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Write the values that the layers changed: moving statistics as means over the replicas."""
    changed = {
        name: new
        for (name, _), old, new in zip(sorted(values.fixed.items()), before, after, strict=True)
        if new is not old
    }
    floats = {n: x for n, x in changed.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    replica = get_replica_context()
    if floats and replica is not None:
        changed |= replica.all_reduce("mean", jax.lax.stop_gradient(floats))
    for name, new in changed.items():
        values.fixed[name][...] = new


def check_metrics(model: Any) -> None:
    """Check that each metric of `compile` is a mean over rows.

    Raises:
        UnsupportedError: A metric is not a mean over rows, or the model has several outputs.
    """
    wrapper = keras_module("metrics.reduction_metrics").MeanMetricWrapper
    # A model without a list of outputs is a subclass with its own `call`.
    count = len(getattr(model, "outputs", None) or [None])
    for metric in _list_metrics(model):
        is_mean = isinstance(metric, wrapper) and type(metric).update_state is wrapper.update_state
        if is_mean and count == 1:
            continue
        why = (
            f"the metric {metric.name!r}, a {type(metric).__name__}"
            if not is_mean
            else f"metrics for {count} outputs"
        )
        raise refuse(
            f"the Keras model {model.name!r} with {why}.",
            "An evaluation of an Estimator takes the mean of a value of each row of one output.",
            "Leave it out of compile, or evaluate with the model's own evaluate.",
            kind=UnsupportedError,
        )


def compute_metrics(model: Any, labels: Any, predictions: Any) -> dict[str, Any]:
    """Return each metric of `compile` for each row; with a mask, also the weights of the rows."""
    found: dict[str, Any] = {}
    mask = keras_module("backend").get_keras_mask(predictions)
    for metric in _list_metrics(model):
        values = metric._fn(labels, predictions, **metric._fn_kwargs)
        values, weights = keras_module("metrics.reduction_metrics").reduce_to_samplewise_values(
            values, mask, jnp.mean, metric.dtype
        )
        if weights is None:
            found[metric.name] = values
        else:
            # Keras divides the sum of the weighted values by the sum of the weights.
            own = jnp.where(weights > 0, values / jnp.where(weights > 0, weights, 1), 0)
            found[metric.name] = (own, weights)
    return found


def _list_metrics(model: Any) -> list[Any]:
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


def check_optimizer(name: str, optimizer: Any) -> None:
    """Check that an optimizer of Keras is a function of its state and the gradients.

    Args:
        name: The name of the model.
        optimizer: Its optimizer.

    Raises:
        UnsupportedError: The optimizer scales the loss, or overwrites weights by their averages.
    """
    scales = isinstance(
        optimizer, keras_module("optimizers.loss_scale_optimizer").LossScaleOptimizer
    )
    if not scales and not getattr(optimizer, "use_ema", False):
        return
    what = "a LossScaleOptimizer" if scales else "an optimizer with use_ema=True"
    instead = "mixed_bfloat16, which needs no scaling" if scales else "optax.ema in an optax chain"
    raise refuse(
        f"the Keras model {name!r} with {what}.",
        "An Estimator passes gradients to the optimizer, and saves the weights that it returns.",
        f"Use {instead}, or train the model with its own fit in the strategy's scope.",
        kind=UnsupportedError,
    )


def make_transformation(optimizer: Any) -> optax.GradientTransformation:
    """Return a transformation whose updates lead to the weights that the optimizer computes.

    The optimizer must be built. The state begins with its current values.
    """

    return _keras_servers.make_transformation(
        optimizer, lambda: [jnp.array(np.asarray(v.value)) for v in optimizer.variables]
    )
