"""`RemoteValue`: the result of a closure, which may not have run yet."""

import abc
import threading
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxdist._parameter_server.variables.servers import Fence
from jaxdist._values import Arithmetic, Instead
from jaxdist.errors import ArgumentTypeError, MissingNameError

_RULE = "The function runs on a worker, and its result is here once it has been fetched."
_REMEDY = "Call value.fetch() or coordinator.fetch(value), which wait for the result."


class NoOperand(Arithmetic):
    """A base class whose operators, conversions and names of arrays are named errors."""

    __slots__ = ()

    _instead = Instead(_RULE, _REMEDY)

    def _name_with_items(self) -> str:
        return f"{self!r}, the result of a scheduled function,"

    def _operand(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"{self!r}, the result of a scheduled function, was used as an array or a number."
            f"\n\n{_RULE}\n\n{_REMEDY}"
        )

    __array__ = __float__ = __int__ = __index__ = __complex__ = _operand

    def __format__(self, spec: str) -> str:
        if spec:
            self._operand()
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingNameError(
            f"{self!r}, the result of a scheduled function, has no attribute {name!r}.\n\n"
            f"{_RULE}\n\n{_REMEDY}",
            name=name,
            obj=self,
        )


class RemoteValue(NoOperand, abc.ABC):
    """The result of a function that was given to `ClusterCoordinator.schedule`.

    It cannot be an argument of `schedule`, since it may not exist yet.

    Example:
        >>> from jaxdist._parameter_server.coordinator import RemoteValue
        >>> RemoteValue.__abstractmethods__ == {"fetch", "get"}
        True

    Source:
        `tf.distribute.coordinator.RemoteValue`.
    """

    __slots__ = ("__weakref__",)

    @abc.abstractmethod
    def fetch(self) -> Any:
        """Wait for the result, and return it as arrays of NumPy.

        Returns:
            What the function returned, with its structure; None for a function without a result.

        Raises:
            CancelledError: The function was cancelled, because another one had failed.
            Exception: What the function itself raised.
        """

    @abc.abstractmethod
    def get(self) -> Any:
        """Wait for the result, and return it as arrays of JAX on the coordinator.

        Returns:
            What the function returned, with its structure; None for a function without a result.

        Raises:
            CancelledError: The function was cancelled, because another one had failed.
            Exception: What the function itself raised.
        """


class ClosureResult(RemoteValue):
    """The result of one closure, set once by the thread of a worker.

    Args:
        fence: Increased when the result is fetched for the first time.
    """

    __slots__ = ("_error", "_gate", "_is_set", "_traceback", "_value", "fence", "is_new")

    def __init__(self, fence: Fence) -> None:
        # A lock that is free once there is a result: an Event takes five times as long to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_set = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self.fence = fence
        self.is_new = True

    def set_value(self, value: Any) -> None:
        """Set the result."""
        self._value = value
        self._open()

    def set_error(self, error: BaseException) -> None:
        """Set the error that `fetch` and `get` raise."""
        self._error, self._traceback = error, error.__traceback__
        self._open()

    def _open(self) -> None:
        self._is_set = True
        self._gate.release()

    def is_ready(self) -> bool:
        """Whether there is a result or an error."""
        return self._is_set

    def fetch(self) -> Any:
        """Wait for the result, and return it as arrays of NumPy."""
        with self._gate:
            if self.is_new:
                # The caller now knows what the closure changed: see Note [Fence].
                self.fence.advance()
                self.is_new = False
        if self._error is not None:
            # Without the frames of earlier calls.
            raise self._error.with_traceback(self._traceback)
        return self._value

    def get(self) -> Any:
        """Wait for the result, and return it as arrays of JAX."""
        return jax.tree.map(jnp.asarray, self.fetch())

    def __repr__(self) -> str:
        if not self.is_ready():
            return "RemoteValue(not ready)"
        if self._error is not None:
            return f"RemoteValue({type(self._error).__name__})"
        return f"RemoteValue({self._value!r})"
