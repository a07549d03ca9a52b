"""Hooks and listeners: user code that runs around the steps and checkpoints of a loop."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxdist._validate import as_list, show
from jaxdist.errors import ArgumentTypeError, UnknownError


class Session:
    """The model and the global step, as hooks see them.

    TensorFlow's hooks get a session to run operations in. Here they get the modules
    themselves: `session.modules["model"]`.

    Args:
        modules: The Flax NNX modules by name.
        find_step: Returns the global step.
        stop_all: Ends the training of all workers, if they are not in step.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        find_step: Callable[[], int],
        stop_all: Callable[[], None] | None = None,
    ) -> None:
        self.modules = modules
        self._find_step, self._stop_all = find_step, stop_all

    @property
    def global_step(self) -> int:
        """The number of completed steps of all workers together."""
        return self._find_step()

    def stop_all(self) -> None:
        """End the training of all workers, if they are not in step; else do nothing."""
        if self._stop_all is not None:
            self._stop_all()


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


class CheckpointSaverListener:
    """Base class of listeners, which run before and after a checkpoint is saved.

    Only the chief calls them.

    Example:
        >>> class Tell(jaxdist.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print("saved", global_step_value)

    Source:
        `tf.estimator.CheckpointSaverListener`.
    """

    def begin(self) -> None:
        """Run before the variables are restored or made."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Run before a checkpoint is saved.

        Args:
            session: The model and the global step.
            global_step_value: The step of the checkpoint.
        """

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Run after a checkpoint is on disk.

        Args:
            session: The model and the global step.
            global_step_value: The step of the checkpoint.

        Returns:
            True to end the training.
        """

    def end(self, session: Session, global_step_value: int) -> None:
        """Run at the end of a training that raised nothing, after the last checkpoint.

        Args:
            session: The model and the global step.
            global_step_value: The last step.
        """


def check_hooks(name: str, hooks: Any, kind: type[Any] = SessionRunHook) -> list[Any]:
    """Return hooks, or listeners, as a list.

    Raises:
        ArgumentTypeError: The value is not a list of objects of this kind.
    """
    if hooks is None:
        return []
    what = f"a list of objects of classes that derive from estimator.{kind.__name__}"
    return as_list(name, hooks, what, f"Pass for instance {name}=[Mine()].", kind=kind)


def call_each(hooks: Iterable[Any], method: str, *args: Any) -> list[Any]:
    """Call a method of hooks, or of listeners, and return the results.

    An error gets a note with the hook that raised it, and how to continue.

    Raises:
        ArgumentTypeError: A hook requests values, as hooks of TensorFlow do.
        UnknownError: A hook raised StopIteration, which would end loops outside.
    """
    found = []
    for hook in hooks:
        try:
            result = getattr(hook, method)(*args)
            if method == "before_run" and result is not None:
                # A hook of TensorFlow may return SessionRunArgs.
                raise ArgumentTypeError(
                    f"{type(hook).__qualname__}.before_run returned {show(result)}.\n\n"
                    "There is no graph from which a hook could fetch values: before_run "
                    "returns None.\n\n"
                    "Read run_values.results['loss'] in after_run, or session.modules."
                )
        except BaseException as error:
            note = (
                f"It was raised by {type(hook).__qualname__}.{method}. The loop ended "
                "without calling `end` of its hooks. The newest checkpoint is complete, and the "
                "next call continues from it."
            )
            error.add_note(note)
            if isinstance(error, StopIteration):
                # An iterator that the hook reads has ended. Loops outside would end as well.
                raise UnknownError(
                    f"{error!r} was raised in a hook.\n\n{note}\n\n"
                    "Let the hook call run_context.request_stop() to end the loop."
                ) from error
            raise
        found.append(result)
    return found
