"""`EstimatorSpec`: the result of a model function, and `ModeKeys`: the modes of its calls."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_list, check_instance, is_array, show
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.estimator._hooks import SessionRunHook

_CALLER = "estimator.EstimatorSpec"


class ModeKeys:
    """The modes in which a model function is called.

    Attributes:
        TRAIN: To train.
        EVAL: To evaluate.
        PREDICT: To predict.

    Example:
        >>> jaxdist.estimator.ModeKeys.PREDICT
        'infer'

    Source:
        `tf.estimator.ModeKeys`.
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
_NEEDS = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_HOOKS = ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks")


def check_transformation(name: str, value: Any, example: str) -> None:
    """Check that a value is an optax transformation; `example` shows what to pass.

    Raises:
        ArgumentTypeError: The value is something else.
    """
    if isinstance(value, optax.MultiSteps):
        example = f"Pass its transformation: {name}=steps.gradient_transformation()."
    kind, what = optax.GradientTransformation, "an optax transformation"
    check_instance(name, value, kind, what, example)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class EstimatorSpec:
    """The result of a model function.

    Shapes:
        For a batch of `b` rows of one replica: `loss` is a scalar, the mean over the rows, or
        `[b]`; each leaf of `predictions` is `[b, ...]`; each metric is `[b]`.

    Args:
        mode: One of `ModeKeys`.
        predictions: Arrays, or a dict of arrays by name.
        loss: The loss of the batch. Required for `TRAIN` and `EVAL`.
        train_op: The optax transformation that turns gradients into updates. The gradients are
            those of `loss` for all parameters of the modules from `get_module`, as the mean over
            the replicas. Required for `TRAIN`.
        eval_metric_ops: For `EVAL`, metrics by name: the value of each row, or a pair of the
            values and the weights of the rows. The result is the weighted mean over all rows.
        export_outputs: For `PREDICT`, what an export returns instead of `predictions`.
        training_chief_hooks: Hooks of the chief, while it trains.
        training_hooks: Hooks of every worker, while it trains.
        evaluation_hooks: Hooks of an evaluation.
        prediction_hooks: Hooks of a prediction.

    Raises:
        ArgumentError: `mode` is not valid, an argument that the mode requires is missing, or a
            metric is called `loss` or `global_step`.
        ArgumentTypeError: An argument is of the wrong type.

    Example:
        >>> spec = jaxdist.estimator.EstimatorSpec("infer", predictions={"y": jnp.zeros(3)})
        >>> spec
        EstimatorSpec(mode='infer', predictions)

    Source:
        `tf.estimator.EstimatorSpec`.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: optax.GradientTransformation | None = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[SessionRunHook] | None = None
    training_hooks: Sequence[SessionRunHook] | None = None
    evaluation_hooks: Sequence[SessionRunHook] | None = None
    prediction_hooks: Sequence[SessionRunHook] | None = None

    @called(_CALLER)
    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in _MODES:
            raise refuse(
                f"mode={show(self.mode)}.",
                f"mode is one of {', '.join(map(repr, _MODES))}.",
                "Pass the mode that the model function was called with.",
            )
        for name in _NEEDS[self.mode]:
            if getattr(self, name) is None:
                raise refuse(
                    f"mode={self.mode!r}, and no {name}.",
                    f"For this mode a model function returns {' and '.join(_NEEDS[self.mode])}.",
                    f"Pass {name}={_EXAMPLES[name]}.",
                )
        if self.train_op is not None:
            example = "Pass for instance train_op=optax.adam(1e-3)."
            check_transformation("train_op", self.train_op, example)
        self._check_metrics()
        for name in _HOOKS:
            given = getattr(self, name)
            if given is not None:
                example = f"Pass for instance {name}=[MyHook()]."
                listed = as_list(name, given, "a list of hooks", example, kind=SessionRunHook)
                object.__setattr__(self, name, tuple(listed))

    def _check_metrics(self) -> None:
        metrics = self.eval_metric_ops
        if metrics is None:
            return
        what, remedy = "a dict of metrics by name", "Pass {'accuracy': values_of_the_rows}."
        check_instance("eval_metric_ops", metrics, Mapping, what, remedy)
        for name in metrics:
            if not isinstance(name, str) or name in ("loss", "global_step", ""):
                raise refuse(
                    f"eval_metric_ops with the name {name!r}.",
                    "The result of an evaluation has the metrics by name, and also 'loss' and "
                    "'global_step'.",
                    "Give the metric another name.",
                )

    def __repr__(self) -> str:
        found = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name) is not None]
        return f"EstimatorSpec({', '.join([f'mode={self.mode!r}', *found])})"


_EXAMPLES = {
    "loss": "jnp.mean(losses)",
    "train_op": "optax.adam(1e-3)",
    "predictions": "{'logits': logits}",
}


def as_pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return the values and the weights of the rows, for a metric or the loss.

    Raises:
        ArgumentTypeError: The value is neither an array nor a pair of arrays.
        ShapeError: It does not have one value for each row.
    """
    values, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    for part in (values, weights):
        if part is not None and not is_array(part):
            raise ArgumentTypeError(
                f"model_fn returned {show(part)} for eval_metric_ops[{name!r}].\n\n"
                "A metric is the value of each row, or a pair of values and weights.\n\n"
                f"Return for instance {{'{name}': (jnp.argmax(logits, -1) == labels)}}."
            )
    values = jnp.asarray(values)
    weights = jnp.ones(values.shape) if weights is None else jnp.asarray(weights)
    if values.ndim != 1 or weights.shape != values.shape:
        raise ShapeError(
            f"model_fn returned values of shape {list(values.shape)} and weights of shape "
            f"{list(weights.shape)} for eval_metric_ops[{name!r}].\n\n"
            "A metric has one value for each row, [b], and so do its weights.\n\n"
            "Leave the mean out: an evaluation takes it over all rows of the dataset."
        )
    return values.astype(jnp.float32), weights.astype(jnp.float32)


def check_spec(spec: Any, mode: str, rows: int) -> EstimatorSpec:
    """Check the result of a model function.

    Raises:
        ArgumentTypeError: It is not an `EstimatorSpec`, or its loss is not an array.
        ArgumentError: Its mode is another one.
        ShapeError: The loss is neither a scalar nor one value for each row.
    """
    if not isinstance(spec, EstimatorSpec):
        raise ArgumentTypeError(
            f"model_fn returned {show(spec)}.\n\nA model function returns an EstimatorSpec.\n\n"
            "End it with: return jaxdist.estimator.EstimatorSpec(mode, ...)."
        )
    if spec.mode != mode:
        raise ArgumentError(
            f"model_fn was called with mode={mode!r}, and returned an EstimatorSpec of the mode "
            f"{spec.mode!r}.\n\nThe two modes are the same.\n\nReturn EstimatorSpec(mode, ...)."
        )
    if spec.loss is None:
        return spec
    if not is_array(spec.loss):
        raise ArgumentTypeError(
            f"model_fn returned loss={show(spec.loss)}.\n\nThe loss is an array.\n\n"
            "Return for instance loss=jnp.mean(losses)."
        )
    shape = jnp.shape(spec.loss)
    if shape not in ((), (rows,)):
        raise ShapeError(
            f"model_fn returned a loss of shape {list(shape)}, for a batch of {rows} row(s).\n\n"
            f"The loss is a scalar, the mean over the rows, or [{rows}], a value of each row.\n\n"
            "Take the mean over the other dims: jnp.mean(losses, axis=range(1, losses.ndim))."
        )
    return spec


def count_rows(features: Any) -> int:
    """Return the number of rows of a batch.

    Raises:
        ShapeError: The batch has no rows.
    """
    leaves = jax.tree.leaves(features)
    if not leaves or not jnp.shape(leaves[0]):
        raise ShapeError(
            f"estimator.Estimator: input_fn gave the features {show(features)}.\n\n"
            "Features are arrays [b, ...], or a pytree of these, one row for each example.\n\n"
            "Let each element of the dataset be a batch."
        )
    # In an export the number of rows is symbolic.
    rows: int = jnp.shape(leaves[0])[0]
    return rows


@called("estimator.Estimator")
def take_mean_of_rows(losses: Any) -> Any:
    """Return a scalar, or one value for each row."""
    if not is_array(losses):
        raise refuse_type(
            f"loss, which returned {show(losses)}.",
            "loss(predictions, labels) returns an array.",
            "Pass for instance loss=optax.l2_loss.",
        )
    losses = jnp.asarray(losses)
    return losses if losses.ndim < 2 else jnp.mean(losses, axis=tuple(range(1, losses.ndim)))
