"""Makes one kind of model function and input function from everything `Estimator` accepts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax
from flax import nnx

from jaxdist import data
from jaxdist._called import call_as, called, name_call, refuse
from jaxdist._strategies import Strategy
from jaxdist._validate import check_callable, check_instance, show
from jaxdist._values import is_per_replica
from jaxdist.errors import ArgumentError
from jaxdist.estimator._model.building import get_module
from jaxdist.estimator._model.keras_model import (
    check_keras_model,
    check_optimizer,
    is_keras_object,
    make_from_keras,
)
from jaxdist.estimator._model.spec import (
    EstimatorSpec,
    ModeKeys,
    check_transformation,
    take_mean_of_rows,
)

_CALLER = "estimator.Estimator"
# Called with features, labels, mode, params and config; see `make_model_fn`.
ModelFn: TypeAlias = Callable[[Any, Any, str, Any, Any], Any]
InputFn: TypeAlias = Callable[[data.InputContext], Any]
_NAMES = ("features", "labels", "mode", "params", "config")
_INPUT_NAMES = ("mode", "params", "config", "input_context")


def make_model_fn(
    given: Any,
    params: Mapping[str, Any] | None,
    loss: Any,
    optimizer: Any,
    metrics: Mapping[str, Any] | None,
) -> ModelFn:
    """Return a model function of five arguments.

    Raises:
        UnsupportedError: A Keras model uses another backend, or its optimizer does more than
            update weights.
        ArgumentError: A model function has other arguments, or does not take `params`; a module
            has no loss or optimizer; a model function comes with a loss.
        ArgumentTypeError: An argument is of the wrong type.
    """
    of_module = {"loss": loss, "optimizer": optimizer, "metrics": metrics}
    if is_keras_object(given):
        check_keras_model(given)
        is_own = all(value is None for value in of_module.values())
        if is_own and getattr(given, "compiled", False):
            check_optimizer(given.name, given.optimizer)
        else:
            _check_parts(f"the Keras model {given.name!r}", loss, optimizer, metrics)
        return make_from_keras(given, loss, optimizer, metrics)
    if isinstance(given, nnx.Module):
        _check_parts("a module", loss, optimizer, metrics)
        return _make_from_module(given, loss, optimizer, metrics)
    check_callable(
        given,
        "model_fn",
        "Pass a function (features, labels, mode, params, config), or a Flax NNX module.",
    )
    for name, value in of_module.items():
        if value is not None:
            raise refuse(
                f"a model function and {name}={show(value)}.",
                f"A model function returns its own {name} in an EstimatorSpec; {name}= belongs to "
                "a module.",
                f"Leave out {name}.",
            )
    return _adapt(given, params)


def _list_parameters(
    function: Callable[..., Any], known: Sequence[str]
) -> tuple[dict[str, inspect.Parameter], list[str]]:
    """Return the parameters of a function, and those without a default that are not known."""
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}, []
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [n for n, p in found.items() if p.default is p.empty and p.kind not in variadic]
    return found, [n for n in needed if n not in known]


def _adapt(given: Callable[..., Any], params: Mapping[str, Any] | None) -> ModelFn:
    """Return a function of five arguments that passes on those that `given` takes."""
    found, others = _list_parameters(given, _NAMES)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in found.values())
    names = [n for n in _NAMES if takes_all or n in found]
    if "features" not in names or others:
        raise refuse(
            f"model_fn, which takes ({', '.join(found)}).",
            "A model function takes features, and may take labels, mode, params and config, by "
            "these names.",
            "Write def model_fn(features, labels, mode, params, config).",
        )
    if params is not None and "params" not in names:
        raise refuse(
            f"params={show(dict(params))}, and model_fn takes ({', '.join(found)}).",
            "params are for the model function.",
            "Add the argument params to model_fn, or leave params out.",
        )

    def call(features: Any, labels: Any, mode: str, params: Any, config: Any) -> Any:
        if labels is not None and "labels" not in names:
            raise ArgumentError(
                f"{_CALLER}: input_fn yields labels, and model_fn takes ({', '.join(found)}).\n\n"
                "A dataset of pairs holds features and labels.\n\n"
                "Add the argument labels to model_fn, or yield features only."
            )
        given_by_name = dict(zip(_NAMES, (features, labels, mode, params, config), strict=True))
        return given(**{name: given_by_name[name] for name in names})

    return call


def _check_parts(what: str, loss: Any, optimizer: Any, metrics: Mapping[str, Any] | None) -> None:
    """Check the arguments that belong to a module.

    Raises:
        ArgumentError: There is no loss, or no optimizer.
        ArgumentTypeError: An argument is of the wrong type.
    """
    rule = (
        "A module computes predictions, loss(predictions, labels) is minimized, and optimizer "
        "updates the parameters."
    )
    example = "Pass for instance loss=optax.l2_loss, optimizer=optax.adam(1e-3)."
    if "Keras" in what:
        example = f"{example[:-1]}, or none of them and a compiled model."
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is None:
            raise refuse(f"{what}, and no {name}.", rule, example)
    check_callable(loss, "loss", example)
    check_transformation("optimizer", optimizer, example)
    if metrics is not None:
        remedy = "Pass {'accuracy': lambda predictions, labels: ...}."
        check_instance("metrics", metrics, Mapping, "a dict of functions", remedy)
        for name, metric in metrics.items():
            check_callable(metric, f"metrics[{name!r}]", remedy)


def _make_from_module(
    module: nnx.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    metrics: Mapping[str, Any] | None,
) -> ModelFn:
    def call(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        del params, config
        # A clone, so that each model begins with the values that the module had.
        found = get_module(lambda rngs: nnx.clone(module))
        predictions = found(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        if labels is None:
            raise ArgumentError(
                f"{_CALLER}: input_fn yields features without labels.\n\n"
                "loss(predictions, labels) needs both.\n\n"
                "Let the dataset of input_fn yield pairs (features, labels)."
            )
        return EstimatorSpec(
            mode,
            predictions=predictions,
            loss=take_mean_of_rows(loss(predictions, labels)),
            train_op=optimizer,
            eval_metric_ops={n: m(predictions, labels) for n, m in (metrics or {}).items()},
        )

    return call


def make_input_fn(input_fn: Any, *, mode: str, params: Any, config: Any) -> InputFn:
    """Return a function that calls `input_fn` with the arguments that it takes.

    Raises:
        ArgumentTypeError: `input_fn` is not a function.
        ArgumentError: It takes other arguments.
    """
    example = "Pass a function: lambda: jaxdist.data.batches(arrays, 32)."
    check_callable(input_fn, "input_fn", example)
    found, others = _list_parameters(input_fn, _INPUT_NAMES)
    if others:
        raise refuse(
            f"input_fn, which takes ({', '.join(found)}).",
            f"input_fn may take {', '.join(_INPUT_NAMES)}, by these names.",
            example,
        )

    caller = name_call()

    def call(context: data.InputContext) -> Any:
        values = dict(zip(_INPUT_NAMES, (mode, params, config, context), strict=True))
        made = input_fn(**{name: values[name] for name in _INPUT_NAMES if name in found})
        if made is None:
            raise call_as(
                caller,
                refuse,
                f"input_fn, which returned {show(made)}.",
                "input_fn returns a dataset, each element of which is the batch of one replica.",
                "End it with return; for instance return jaxdist.data.batches(arrays, 32).",
            )
        return made

    return call


@called(None, replaces="distribute_datasets_from_function", arguments={"dataset_fn": "input_fn"})
def open_input(
    strategy: Strategy,
    input_fn: Callable[[data.InputContext], Any],
    options: data.InputOptions,
) -> data.DistributedIterator:
    """Return the batches of an input function; errors name `input_fn`."""
    return iter(strategy.distribute_datasets_from_function(input_fn, options))


def split_batch(element: Any) -> tuple[Any, Any]:
    """Return the features and the labels of a batch; labels are None if it has none."""
    if isinstance(element, (tuple, list)) and len(element) == 2:
        return element[0], element[1]
    return element, None


def take_local(strategy: Strategy, batch: Any) -> Any:
    """Return the batch of the first replica of this process."""
    return jax.tree.map(
        lambda x: strategy.experimental_local_results(x)[0], batch, is_leaf=is_per_replica
    )
