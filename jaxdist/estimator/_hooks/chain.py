"""`HookChain`: calls all hooks, and names the one that fails."""

from collections.abc import Sequence
from typing import Any

from jaxdist._validate import as_list, show
from jaxdist.errors import ArgumentTypeError, UnknownError
from jaxdist.estimator._hooks.hook import SessionRunContext, SessionRunHook, SessionRunValues
from jaxdist.estimator._hooks.session import Session


def check_hooks(name: str, hooks: Any, kind: type[Any] = SessionRunHook) -> list[Any]:
    """Return hooks, or listeners, as a list.

    Raises:
        ArgumentTypeError: The value is not a list of objects of this kind.
    """
    if hooks is None:
        return []
    what = f"a list of objects of classes that derive from estimator.{kind.__name__}"
    return as_list(name, hooks, what, f"Pass for instance {name}=[Mine()].", kind=kind)


class NameFailure:
    """A context manager that adds to an error the hook that raised it, and how to continue."""

    def __init__(self, hook: Any, method: str) -> None:
        self._hook, self._method = hook, method

    def __enter__(self) -> None:
        """Do nothing on entry."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        note = (
            f"It was raised by {type(self._hook).__qualname__}.{self._method}. The loop has ended "
            "without `end` of its hooks. The newest checkpoint is complete, and the next call goes "
            "on from it."
        )
        error.add_note(note)
        if isinstance(error, StopIteration):
            # An iterator that the hook reads has ended. Loops outside would end as well.
            raise UnknownError(
                f"{error!r} left a hook.\n\n{note}\n\n"
                "Let the hook call run_context.request_stop() to end the loop."
            ) from error


class HookChain:
    """The hooks of a loop.

    Args:
        hooks: The hooks, in the order in which they are called.
    """

    def __init__(self, hooks: Sequence[SessionRunHook]) -> None:
        self._hooks = list(hooks)
        self._context: SessionRunContext | None = None

    def begin(self) -> None:
        """Call `begin` of all hooks."""
        for hook in self._hooks:
            with NameFailure(hook, "begin"):
                hook.begin()

    def add(self, hooks: Sequence[SessionRunHook]) -> None:
        """Add the hooks of a model function, and call their `begin`."""
        added = HookChain(hooks)
        added.begin()
        self._hooks += added._hooks

    def open(self, session: Session) -> SessionRunContext:
        """Call `after_create_session` of all hooks, and return the context of the loop."""
        context = self._context = SessionRunContext(session)
        for hook in self._hooks:
            with NameFailure(hook, "after_create_session"):
                hook.after_create_session(session, context)
        return context

    def before_run(self, context: SessionRunContext) -> None:
        """Call `before_run` of all hooks.

        Raises:
            ArgumentTypeError: A hook requests values, as hooks of TensorFlow do.
        """
        for hook in self._hooks:
            with NameFailure(hook, "before_run"):
                # A hook of TensorFlow may return SessionRunArgs.
                given: Any = hook.before_run(context)  # type: ignore[func-returns-value]
                if given is not None:
                    raise ArgumentTypeError(
                        f"{type(hook).__qualname__}.before_run returned {show(given)}.\n\n"
                        "There is no graph from which a hook could fetch values: before_run "
                        "returns None.\n\n"
                        "Read run_values.results['loss'] in after_run, or session.modules."
                    )

    def after_run(self, context: SessionRunContext, values: SessionRunValues) -> None:
        """Call `after_run` of all hooks."""
        for hook in self._hooks:
            with NameFailure(hook, "after_run"):
                hook.after_run(context, values)

    def end(self, session: Session) -> None:
        """Call `end` of all hooks."""
        for hook in self._hooks:
            with NameFailure(hook, "end"):
                hook.end(session)
