"""`Server`: functions that other processes call by name."""

import threading
import weakref
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._parameter_server.rpc.client import RESERVED
from jaxdist._parameter_server.rpc.served import Call, ListMethods, Methods, make_method
from jaxdist._parameter_server.rpc.values import check_not_traced, is_sendable
from jaxdist._parameter_server.transport import Limits, Listener, serve
from jaxdist._parameter_server.transport.connect import check_layer, split_address
from jaxdist._parameter_server.transport.requests import make_handlers
from jaxdist._validate import as_flag, check_callable, check_text, show
from jaxdist.errors import ContextError

_LONGEST_NAME = 200
# More than the default, since calls that wait for their turn occupy a thread each.
_LIMITS = Limits(calls=2048)


class Server:
    """A server whose functions other processes call by name, with arrays.

    It answers from `start` until `stop`, until nothing refers to it any more, or until the process
    ends. Arrays and the names of functions are sent, never functions and never pickles. On another
    address than loopback it needs TLS or a secret (`JAXDIST_SECRET_FILE`), see
    `docs/machines/rpc.md`.

    Example:
        >>> import jax
        >>> from jaxdist.experimental import rpc
        >>> number = jax.ShapeDtypeStruct((), "int32")
        >>> server = rpc.Server.create("grpc", "localhost:0")
        >>> server.register("addition", lambda a, b: a + b, input_signature=[number, number])
        >>> server.start()
        >>> client = rpc.Client.create("grpc", server.address)
        >>> client.addition(2, 3).get_value()
        array(5, dtype=int32)
        >>> server.stop()

    Source:
        `tf.distribute.experimental.rpc.Server`.
    """

    @called("Server.create")
    def __init__(self, rpc_layer: str, address: str) -> None:
        check_not_traced()
        check_layer(rpc_layer)
        split_address(address)
        self._layer, self._address = rpc_layer, address
        self._methods = Methods()
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._is_stopped = False

    @staticmethod
    def create(rpc_layer: str, address: str) -> "Server":
        """Return a server that does not answer yet.

        Args:
            rpc_layer: `"grpc"`; or `"local"` for clients of the same process, without a network.
            address: Host and port, such as `"localhost:8470"`. Port 0 is a free port, which
                `server.address` has after `start`.

        Returns:
            The server.

        Raises:
            ArgumentError: The layer or the address is not valid.
            UnsupportedError: A function is being traced.

        Example:
            >>> jaxdist.experimental.rpc.Server.create("grpc", "localhost:8470")
            <rpc.Server at localhost:8470: not started>

        Source:
            `tf.distribute.experimental.rpc.Server.create`.
        """
        return Server(rpc_layer, address)

    @property
    def address(self) -> str:
        """The address; after `start` with the real port if port 0 was requested."""
        return self._address if self._listener is None else self._listener.address

    @called("Server.register")
    def register(
        self,
        method_name: str,
        func: Any,
        input_signature: Any = None,
        *,
        concurrent: bool = False,
    ) -> None:
        """Let clients call a function by a name.

        A `jaxdist.function` runs as one program, and may read and assign variables of this
        process. Any other function runs in Python, with arrays of JAX. The server checks the
        arguments of a call before it calls the function.

        Args:
            method_name: The name. Clients have the attributes `name` and `name_blocking`.
            func: The function, of positional arguments. It returns arrays and numbers in dicts
                with strings as keys, lists, tuples and None.
            input_signature: A list with one entry for each argument: a pytree of
                `jax.ShapeDtypeStruct`. A dimension of any size is a name of
                `jax.export.symbolic_shape`. Left out for a function without arguments, and for one
                that was compiled by `jax.jit(func).lower(...).compile()`.
            concurrent: Whether several calls of this function may run at a time, also beside other
                functions. Otherwise the functions of a server run one after the other, so that
                none overwrites what another one assigns. A function that waits for another call
                needs True.

        Raises:
            ArgumentError: The name is taken or not possible; the signature is missing, or has
                another number of arguments than the function.
            ArgumentTypeError: `func` is not a function, or a leaf of the signature is not an array.
            ContextError: The server was started.

        Cost:
            Nothing is compiled here. A `jaxdist.function` compiles at its first call, which the
            deadline of that call covers.

        Example:
            >>> import jax
            >>> seen = jaxdist.Variable(0, name="seen")
            >>> @jaxdist.function
            ... def count(batch):
            ...     return {"seen": seen.assign_add(batch["x"].shape[0])}
            >>> rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), "float32")
            >>> server = jaxdist.experimental.rpc.Server.create("local", "localhost:0")
            >>> server.register("count", count, input_signature=[{"x": rows}])

        Source:
            `tf.distribute.experimental.rpc.Server.register`, where the signature is that of the
            `tf.function`.
        """
        _check_name(method_name)
        check_callable(func, "func")
        concurrent = as_flag("concurrent", concurrent)
        method = make_method(method_name, func, input_signature, concurrent)
        with self._lock:
            if self._listener is not None:
                raise refuse(
                    f"the method {method_name!r} after the server was started.",
                    "Clients ask for the methods once, when they are created.",
                    "Register all methods, then call server.start().",
                    kind=ContextError,
                )
            self._check_is_free(method_name)
            self._methods[method_name] = method

    def _check_is_free(self, name: str) -> None:
        plain = name.removesuffix("_blocking")
        others = [n for n in (name, f"{name}_blocking", plain) if n in self._methods]
        if others:
            raise refuse(
                f"the method {name!r}, and {others[0]!r} is already registered.",
                "Each name belongs to one function, also with _blocking after it: clients have "
                "both as attributes.",
                "Choose another name.",
            )

    @called("Server.start", replaces="serve")
    def start(self) -> None:
        """Answer calls from now on. A second call does nothing.

        Raises:
            ClusterError: The address is in use, or belongs to another machine.
            UnauthenticatedError: Other machines reach the address, and there is no TLS and no
                secret.
            ContextError: The server was stopped.
            MissingExtraError: grpcio is not installed.

        Example:
            >>> server = jaxdist.experimental.rpc.Server.create("local", "localhost:0")
            >>> server.start()
            >>> server.stop()

        Source:
            `tf.distribute.experimental.rpc.Server.start`.
        """
        with self._lock:
            if self._is_stopped:
                raise ContextError(
                    f"Server.start was called for {self._address}, and the server was stopped."
                    "\n\nA server is started once.\n\nCreate another one."
                )
            if self._listener is None:
                answer = self._methods.answer
                handlers = make_handlers((Call, ListMethods), answer, "Client and server")
                self._listener = serve(self._address, handlers, layer=self._layer, limits=_LIMITS)
                self._stop = weakref.finalize(self, self._listener.stop)

    def stop(self) -> None:
        """Answer no longer, and free the address. Calls that wait end with `UnavailableError`.

        A function that runs is not interrupted.

        Example:
            >>> server = jaxdist.experimental.rpc.Server.create("local", "localhost:0")
            >>> server.stop()
        """
        with self._lock:
            self._is_stopped = True
            if self._listener is not None:
                self._stop()

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else f"{len(self._methods)} methods"
        is_new = self._listener is None and not self._is_stopped
        return f"<rpc.Server at {self.address}: {'not started' if is_new else state}>"


def _check_name(name: Any) -> None:
    check_text("method_name", name, "addition")
    if len(name) > _LONGEST_NAME or not is_sendable(name):
        raise refuse(
            f"method_name={show(name)}.",
            f"A name is a string of at most {_LONGEST_NAME} characters.",
            "Choose another name.",
        )
    if name.startswith("_") or {name, f"{name}_blocking"} & RESERVED:
        raise refuse(
            f"method_name={name!r}.",
            "Clients have each method as an attribute, so a name does not begin with an "
            f"underscore and is not one of {sorted(n for n in RESERVED if n[0] != '_')}.",
            "Choose another name.",
        )
