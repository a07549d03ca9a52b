"""`TrainSpec` and `EvalSpec`: the training and the evaluation in `train_and_evaluate`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, as_number, check_callable, check_text
from jaxdist.estimator._exporters import check_exporters
from jaxdist.estimator._hooks import CheckpointSaverListener, SessionRunHook, check_hooks

INPUT = "Pass a function that returns a dataset: lambda: jaxdist.data.batches(arrays, 32)."


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training in `train_and_evaluate`.

    Args:
        input_fn: Returns the dataset of one worker; see `Estimator.train`.
        max_steps: The number of steps of all workers together; None to train until the data ends.
        hooks: Hooks of every worker.
        saving_listeners: Listeners of the chief.

    Raises:
        ArgumentError: `max_steps` is less than 1.
        ArgumentTypeError: An argument is of the wrong type.

    Example:
        >>> jaxdist.estimator.TrainSpec(lambda: [], max_steps=10).max_steps
        10

    Source:
        `tf.estimator.TrainSpec`.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] | None = None
    saving_listeners: Sequence[CheckpointSaverListener] | None = None

    @called("estimator.TrainSpec")
    def __post_init__(self) -> None:
        check_callable(self.input_fn, "input_fn", INPUT)
        if self.max_steps is not None:
            as_integer("max_steps", self.max_steps, least=1)
        object.__setattr__(self, "hooks", tuple(check_hooks("hooks", self.hooks)))
        listeners = check_hooks("saving_listeners", self.saving_listeners, CheckpointSaverListener)
        object.__setattr__(self, "saving_listeners", tuple(listeners))


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluation in `train_and_evaluate`.

    Args:
        input_fn: Returns the dataset; see `Estimator.evaluate`.
        steps: How many batches to read; None for all.
        name: The name of the evaluation, if there are several.
        hooks: Hooks of each evaluation.
        exporters: Exporters, which run after each evaluation.
        start_delay_secs: How long an evaluator waits before its first evaluation.
        throttle_secs: How long to wait after the start of an evaluation before the next one.

    Raises:
        ArgumentError: A number is out of range, or two exporters have the same name.
        ArgumentTypeError: An argument is of the wrong type.

    Example:
        >>> jaxdist.estimator.EvalSpec(lambda: []).throttle_secs
        600

    Source:
        `tf.estimator.EvalSpec`.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = None
    exporters: Any = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    @called("estimator.EvalSpec")
    def __post_init__(self) -> None:
        check_callable(self.input_fn, "input_fn", INPUT)
        if self.steps is not None:
            as_integer("steps", self.steps, least=1)
        check_name(self.name)
        object.__setattr__(self, "hooks", tuple(check_hooks("hooks", self.hooks)))
        object.__setattr__(self, "exporters", check_exporters(self.exporters))
        as_number("start_delay_secs", self.start_delay_secs, least=0)
        as_number("throttle_secs", self.throttle_secs, least=0)


def check_name(name: Any) -> None:
    """Check the name of an evaluation, which becomes part of the name of a folder.

    Raises:
        ArgumentTypeError: The name is not a string.
        ArgumentError: It is empty, or not valid as a file name.
    """
    if name is None:
        return
    check_text("name", name, "test")
    if "/" in name or "\0" in name:
        raise refuse(
            f"name={name!r}.",
            "The name is part of the name of a folder: eval_NAME.",
            "Pass for instance name='test'.",
        )
