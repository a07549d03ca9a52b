"""Reads batches from `input_fn`."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxdist import data
from jaxdist._called import call_as, name_call, refuse
from jaxdist._strategies import Strategy
from jaxdist._validate import CallerRename, check_callable, show
from jaxdist._values import is_per_replica
from jaxdist.estimator._model.model_fn import list_parameters

InputFn: TypeAlias = Callable[[data.InputContext], Any]
_NAMES = ("mode", "params", "config", "input_context")


def make_input_fn(input_fn: Any, *, mode: str, params: Any, config: Any) -> InputFn:
    """Return a function that calls `input_fn` with the arguments that it takes.

    Raises:
        ArgumentTypeError: `input_fn` is not a function.
        ArgumentError: It takes other arguments.
    """
    example = "Pass a function: lambda: jaxdist.data.batches(arrays, 32)."
    check_callable(input_fn, "input_fn", example)
    found, others = list_parameters(input_fn, _NAMES)
    if others:
        raise refuse(
            f"input_fn, which takes ({', '.join(found)}).",
            f"input_fn may take {', '.join(_NAMES)}, by these names.",
            example,
        )

    caller = name_call()

    def call(context: data.InputContext) -> Any:
        values = dict(zip(_NAMES, (mode, params, config, context), strict=True))
        made = input_fn(**{name: values[name] for name in _NAMES if name in found})
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


def rename_input() -> CallerRename:
    """Return a context manager in which errors of the dataset name `input_fn`."""
    caller = name_call()
    name = "distribute_datasets_from_function was given dataset_fn"
    return CallerRename(name, f"{caller} was given input_fn")


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
