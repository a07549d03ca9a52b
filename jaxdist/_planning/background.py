"""Work that Ctrl-C need not wait for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def started(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Run a function on a thread of its own.

    XLA compiles for minutes, and nothing stops it. Python can raise KeyboardInterrupt where it
    waits for the result, and does not wait for this thread at its end.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="jaxdist compiles", daemon=True).start()
    return future
