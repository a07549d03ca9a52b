"""Checks that two rooms or more use."""

from typing import Any

from jaxdist.errors import ArgumentTypeError


def call_arguments(caller: str, args: Any, kwargs: Any) -> None:
    """Refuse `args` that is no list or tuple, and `kwargs` that is no dict."""
    if not isinstance(args, (list, tuple)):
        raise _NotAListError(
            f"{caller} takes args as a list or tuple, and {type(args).__name__} was given.\n\n"
            "Wrap a single argument: args=(value,)."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise _NotAListError(
            f"{caller} takes kwargs as a dict, and {type(kwargs).__name__} was given.\n\n"
            "Pass kwargs={'name': value}."
        )


def is_callable(caller: str, fn: Any) -> None:
    """Refuse an `fn` that cannot be called."""
    if not callable(fn):
        raise ArgumentTypeError(
            f"{caller} needs a function, and {type(fn).__name__} was given: {fn!r}.\n\n"
            "Pass the function itself and its arguments apart: "
            "strategy.run(step, args=(state, batch)), not strategy.run(step(state, batch))."
        )


class _NotAListError(ArgumentTypeError, ValueError):
    """A type error that `tf.distribute` documents as `ValueError`; it is both."""
