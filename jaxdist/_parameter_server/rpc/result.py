"""`StatusOrResult`: what a call gives."""

from collections.abc import Callable
from concurrent.futures import Future

from jaxdist._parameter_server.rpc.served import OK, Result, get_code
from jaxdist._typing import PyTree
from jaxdist.errors import JaxdistError


class StatusOrResult:
    """The result of a call, or the error that it ended with. `Client` makes it.

    A call does not wait; each method here waits until the call has ended, at most until its
    deadline.

    Example:
        >>> from jaxdist.experimental import rpc
        >>> server = rpc.Server.create("grpc", "localhost:0")
        >>> server.register("divide", lambda: 1 / 0)
        >>> server.start()
        >>> client = rpc.Client.create("grpc", server.address)
        >>> result = client.divide()
        >>> result.is_ok(), result.get_error()[0]
        (False, 2)
        >>> server.stop()

    Source:
        `tf.distribute.experimental.rpc.Client.call`.
    """

    def __init__(
        self, reply: Future[Result], read: Callable[[Result], PyTree], keep: object
    ) -> None:
        self._reply, self._read = reply, read
        # The connection, which closes when nothing refers to it.
        self._keep = keep

    def is_ok(self) -> bool:
        """Return whether the call was successful. Waits until it has ended.

        Returns:
            False if the call ended with an error, which `get_error` tells.
        """
        return self._wait() is None

    def get_error(self) -> tuple[int, str]:
        """Return the status code and the text of the error. Waits until the call has ended.

        Returns:
            `(0, "")` after a successful call. Otherwise a code of gRPC, such as 3 for arguments
            that do not fit, an unknown method or a `ValueError` of the function, 4 for a deadline,
            and 14 for a server that is gone; and what happened.

        Source:
            TensorFlow gives the text as bytes.
        """
        error = self._wait()
        return (OK, "") if error is None else (get_code(error), str(error))

    def get_value(self) -> PyTree:
        """Return the result of the function. Waits until the call has ended.

        Returns:
            The pytree of the result, with NumPy arrays of the dtypes that the function returned.
            Do not write into them. What `call` without `output_specs` returns is the list of its
            arrays.

        Raises:
            JaxdistError: The error that the call ended with.
            InvalidArgumentError: The result is another one than `output_specs` describe.
        """
        error = self._wait()
        if error is not None:
            raise error
        return self._read(self._reply.result())

    def _wait(self) -> JaxdistError | None:
        error = self._reply.exception()
        if error is None or isinstance(error, JaxdistError):
            return error
        raise error

    def __repr__(self) -> str:
        if not self._reply.done():
            return "<StatusOrResult: the call has not ended>"
        error = self._wait()
        text = "ok" if error is None else str(error).splitlines()[0]
        return f"<StatusOrResult: {text}>"
