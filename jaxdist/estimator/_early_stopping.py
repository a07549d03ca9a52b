"""Early stopping: hooks that end training when the evaluations meet a condition."""

import functools
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxdist._buckets import as_place
from jaxdist._called import call_as, called, name_call, refuse
from jaxdist._validate import (
    as_integer,
    as_number,
    check_callable,
    check_instance,
    check_text,
    show,
)
from jaxdist.estimator._estimator import Estimator
from jaxdist.estimator._hooks import Session, SessionRunContext, SessionRunHook, SessionRunValues
from jaxdist.estimator._running.progress import read_summaries

_Compare = Callable[[Any, Any], bool]


@called("estimator.experimental.read_eval_metrics")
def read_eval_metrics(eval_dir: Any) -> dict[int, dict[str, float]]:
    """Return the results of all evaluations by step, in order of steps.

    Args:
        eval_dir: `Estimator.eval_dir()`.

    Example:
        >>> jaxdist.estimator.experimental.read_eval_metrics("no such folder")
        {}

    Source:
        `tf.estimator.experimental`, `read_eval_metrics` in `early_stopping.py`.
    """
    found = read_summaries(as_place("eval_dir", eval_dir, "runs/eval"))
    return {
        step: {name: value for name, value in values.items() if name != "time"}
        for step, values in sorted(found.items())
    }


class _EarlyStoppingHook(SessionRunHook):
    """Calls a function now and then to decide whether the training should end."""

    def __init__(
        self, should_stop: Callable[[], bool], seconds: float | None, steps: int | None
    ) -> None:
        self._should_stop, self._seconds, self._steps = should_stop, seconds, steps
        self._asked_at: tuple[int, float] | None = None

    def after_create_session(self, session: Session, coord: SessionRunContext) -> None:
        self._asked_at = None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step, now = run_context.session.global_step, time.monotonic()
        if self._asked_at is not None:
            last, then = self._asked_at
            is_due = (
                step >= last + self._steps
                if self._steps is not None
                else now >= then + (self._seconds or 0.0)
            )
            if not is_due:
                return
        self._asked_at = step, now
        if self._should_stop():
            run_context.request_stop()
            run_context.session.stop_all()


@called("estimator.experimental.make_early_stopping_hook")
def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training of all workers when a function returns True.

    Pass it to `Estimator.train` or `TrainSpec` in all workers.

    Args:
        estimator: The estimator that trains.
        should_stop_fn: Called without arguments.
        run_every_secs: How often it is called, in seconds; None for `run_every_steps`.
        run_every_steps: How often it is called, in steps.

    Raises:
        ArgumentError: Both periods are given, or neither.
        ArgumentTypeError: An argument is of the wrong type.

    Source:
        `tf.estimator.experimental.make_early_stopping_hook`.
    """
    return _make_hook(estimator, should_stop_fn, run_every_secs, run_every_steps)


def _make_hook(estimator: Any, should_stop_fn: Any, seconds: Any, steps: Any) -> SessionRunHook:
    example = "Pass the estimator that trains."
    check_instance("estimator", estimator, Estimator, "an estimator.Estimator", example)
    check_callable(should_stop_fn, "should_stop_fn")
    if (seconds is None) == (steps is None):
        raise refuse(
            f"run_every_secs={show(seconds)} and run_every_steps={show(steps)}.",
            "The function is called after some time, or after a number of steps.",
            "Pass one of the two, and None for the other.",
        )
    if seconds is not None:
        as_number("run_every_secs", seconds, least=0)
    if steps is not None:
        as_integer("run_every_steps", steps, least=1)
    return _EarlyStoppingHook(should_stop_fn, seconds, steps)


class _Watched(NamedTuple):
    """A result of the evaluations, and how often a hook reads it."""

    estimator: Any
    metric_name: Any
    eval_dir: Any
    min_steps: Any
    seconds: Any
    steps: Any

    def check(self) -> None:
        example = "Pass the estimator that trains."
        check_instance("estimator", self.estimator, Estimator, "an estimator.Estimator", example)
        check_text("metric_name", self.metric_name, "loss")
        if self.eval_dir is not None:
            as_place("eval_dir", self.eval_dir, "runs/eval")
        as_integer("min_steps", self.min_steps, least=0)

    def read(self) -> Iterator[tuple[int, float]]:
        """Yield the steps of the evaluations, and their values."""
        name = self.metric_name
        folder = self.estimator.eval_dir() if self.eval_dir is None else self.eval_dir
        for step, values in read_eval_metrics(folder).items():
            if step < self.min_steps:
                continue
            if name not in values:
                raise refuse(
                    f"metric_name={name!r}, and an evaluation has {', '.join(sorted(values))}.",
                    "It watches one result of the evaluations.",
                    "Pass one of these names.",
                )
            yield step, values[name]

    def make_hook(self, should_stop: Callable[[], bool]) -> SessionRunHook:
        # The hook runs later, and its errors have the name of the function that makes it.
        stop = functools.partial(call_as, name_call(), should_stop)
        return _make_hook(self.estimator, stop, self.seconds, self.steps)


@called(lambda name: f"estimator.experimental.{name}")
def _make_threshold_hook(
    name: str, watched: _Watched, is_beyond: _Compare, threshold: Any
) -> SessionRunHook:
    watched.check()
    as_number("threshold", threshold)
    return watched.make_hook(
        lambda: any(is_beyond(value, threshold) for _, value in watched.read())
    )


@called(lambda name: f"estimator.experimental.{name}")
def _make_progress_hook(
    name: str, watched: _Watched, is_better: _Compare, most_steps: Any
) -> SessionRunHook:
    watched.check()

    def should_stop() -> bool:
        best: tuple[float, int] | None = None
        for step, value in watched.read():
            if best is None or is_better(value, best[0]):
                best = value, step
            elif step - best[1] >= most_steps:
                return True
        return False

    return watched.make_hook(should_stop)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: Any = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when a metric is above a threshold.

    Args:
        estimator: The estimator that trains.
        metric_name: A result of the evaluations.
        threshold: The threshold.
        eval_dir: The folder of the evaluations; None for `estimator.eval_dir()`.
        min_steps: Evaluations of earlier steps do not count.
        run_every_secs: See `make_early_stopping_hook`.
        run_every_steps: See `make_early_stopping_hook`.

    Source:
        `tf.estimator.experimental.stop_if_higher_hook`.
    """
    watched = _Watched(estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)
    return _make_threshold_hook("stop_if_higher_hook", watched, operator.gt, threshold)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: Any = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when a metric is below a threshold.

    Args:
        estimator: The estimator that trains.
        metric_name: A result of the evaluations.
        threshold: The threshold.
        eval_dir: The folder of the evaluations; None for `estimator.eval_dir()`.
        min_steps: Evaluations of earlier steps do not count.
        run_every_secs: See `make_early_stopping_hook`.
        run_every_steps: See `make_early_stopping_hook`.

    Source:
        `tf.estimator.experimental.stop_if_lower_hook`.
    """
    watched = _Watched(estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)
    return _make_threshold_hook("stop_if_lower_hook", watched, operator.lt, threshold)


@called("estimator.experimental.stop_if_no_increase_hook")
def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: Any = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when a metric has not increased for many steps.

    Args:
        estimator: The estimator that trains.
        metric_name: A result of the evaluations.
        max_steps_without_increase: For how many steps it may not increase.
        eval_dir: The folder of the evaluations; None for `estimator.eval_dir()`.
        min_steps: Evaluations of earlier steps do not count.
        run_every_secs: See `make_early_stopping_hook`.
        run_every_steps: See `make_early_stopping_hook`.

    Source:
        `tf.estimator.experimental.stop_if_no_increase_hook`.
    """
    as_integer("max_steps_without_increase", max_steps_without_increase, least=0)
    watched = _Watched(estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)
    return _make_progress_hook(
        "stop_if_no_increase_hook", watched, operator.gt, max_steps_without_increase
    )


@called("estimator.experimental.stop_if_no_decrease_hook")
def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: Any = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when a metric has not decreased for many steps.

    Args:
        estimator: The estimator that trains.
        metric_name: A result of the evaluations.
        max_steps_without_decrease: For how many steps it may not decrease.
        eval_dir: The folder of the evaluations; None for `estimator.eval_dir()`.
        min_steps: Evaluations of earlier steps do not count.
        run_every_secs: See `make_early_stopping_hook`.
        run_every_steps: See `make_early_stopping_hook`.

    Source:
        `tf.estimator.experimental.stop_if_no_decrease_hook`.
    """
    as_integer("max_steps_without_decrease", max_steps_without_decrease, least=0)
    watched = _Watched(estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)
    return _make_progress_hook(
        "stop_if_no_decrease_hook", watched, operator.lt, max_steps_without_decrease
    )
