"""`LambdaCallback`: functions instead of a class."""

from collections.abc import Callable
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import check_callable
from jaxdist.fit._callbacks.base import Callback

_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        functions: Functions by the name of the method: `on_epoch_end=lambda epoch, logs: ...`.

    Raises:
        ArgumentError: A name is not a method of a callback.

    Example:
        >>> printer = fit.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch))
        >>> printer.on_epoch_end(3, {})
        3

    Source:
        `keras.callbacks.LambdaCallback`.
    """

    @called("fit.LambdaCallback")
    def __new__(cls, **functions: Callable[..., Any]) -> "LambdaCallback":
        wrong = sorted(set(functions) - set(_METHODS))
        if wrong:
            raise refuse(
                f"{', '.join(wrong)}.",
                f"The methods of a callback are {', '.join(_METHODS)}.",
                "Pass functions by these names.",
            )
        for name, function in functions.items():
            check_callable(function, name)
        # Each has its own class, since the class says which methods a callback overrides.
        methods = {name: staticmethod(function) for name, function in functions.items()}
        kind = type("LambdaCallback", (cls,), {**methods, "__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(self, **functions: Callable[..., Any]) -> None:
        super().__init__()
