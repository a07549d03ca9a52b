"""`SessionRunHook`: functions that are called around the steps of a loop."""

import dataclasses
from typing import Any

from jaxdist.estimator._hooks.session import Session


class SessionRunContext:
    """The context that a hook gets before and after a step.

    jaxdist makes it.

    Attributes:
        session: The model and the global step.

    Source:
        `tf.estimator.SessionRunContext`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._is_requested = False

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has called `request_stop`."""
        return self._is_requested

    def should_stop(self) -> bool:
        """Return whether a hook has called `request_stop`, as `tf.train.Coordinator` does."""
        return self._is_requested

    def request_stop(self) -> None:
        """End the loop of this process after the current step.

        If a strategy spans several processes in step, all end together, at most 10 steps later.
        """
        self._is_requested = True


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """The results of a step.

    Attributes:
        results: `loss` and `global_step` of a training step; empty for an evaluation or a
            prediction, whose results come at the end.

    Source:
        `tf.estimator.SessionRunValues`.
    """

    results: dict[str, Any]


class SessionRunHook:
    """Base class of hooks. Override what you need.

    The order is `begin`, `after_create_session`, then `before_run` and `after_run` for each step,
    and `end`. After an exception in a step or a hook, `end` is not called.

    Example:
        >>> class PrintLoss(jaxdist.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         print(float(run_values.results["loss"]))

    Source:
        `tf.estimator.SessionRunHook`.
    """

    def begin(self) -> None:
        """Run before the variables are restored or made."""

    def after_create_session(self, session: Session, coord: SessionRunContext) -> None:
        """Run when the model exists, with the values of its checkpoint.

        Args:
            session: The model and the global step.
            coord: Its `request_stop` ends the loop.
        """

    def before_run(self, run_context: SessionRunContext) -> None:
        """Run before a step.

        Args:
            run_context: Its `request_stop` ends the loop after this step.
        """

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Run after a step.

        Args:
            run_context: Its `request_stop` ends the loop.
            run_values: The results of the step. Reading an array waits for the step.
        """

    def end(self, session: Session) -> None:
        """Run at the end of a loop that raised nothing.

        Args:
            session: The model and the global step.
        """
