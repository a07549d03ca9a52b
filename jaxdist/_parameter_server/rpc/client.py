"""`Client`: calls functions of a server by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._parameter_server.rpc.connection import Connection, StatusOrResult
from jaxdist._parameter_server.rpc.served import Call, Result
from jaxdist._parameter_server.rpc.signature import LeafSpec, Signature, read_spec
from jaxdist._parameter_server.rpc.values import (
    check_not_traced,
    flatten,
    is_sendable,
    read_leaf,
    unflatten,
)
from jaxdist._parameter_server.transport.connect import check_layer
from jaxdist._typing import PyTree
from jaxdist._validate import as_number, check_call_arguments, check_text, show
from jaxdist.errors import CallArgumentsError, InvalidArgumentError, MissingNameError

_MethodOfServer = Callable[..., Any]


class Client:
    """A client that calls the functions of a `Server` by name.

    A new client asks the server for its methods. It has two attributes for each of them:
    `client.name(*args, timeout_in_ms=0)` returns a `StatusOrResult` at once, and
    `client.name_blocking(*args, timeout_in_ms=0)` waits and returns the value, or raises the
    error. Both compare the structure of the arguments first.

    Several threads may call at a time. Calls may be answered in another order than they were
    started in.

    Example:
        >>> import jax
        >>> from jaxdist.experimental import rpc
        >>> vector = jax.ShapeDtypeStruct((3,), "float32")
        >>> server = rpc.Server.create("grpc", "localhost:0")
        >>> server.register("total", lambda x: x.sum(), input_signature=[vector])
        >>> server.start()
        >>> client = rpc.Client.create("grpc", server.address, name="trainer")
        >>> client.total_blocking(np.arange(3, dtype=np.float32))
        array(3., dtype=float32)
        >>> client.total(np.zeros(2, np.float32)).get_error()[0]
        3
        >>> client.close()
        >>> server.stop()

    Source:
        `tf.distribute.experimental.rpc.Client`.
    """

    @called("Client.create")
    def __init__(
        self, rpc_layer: str, address: str, name: str = "", timeout_in_ms: float = 0
    ) -> None:
        check_not_traced()
        check_layer(rpc_layer)
        if not isinstance(name, str):
            raise refuse_type(
                f"name={show(name)}.",
                "name is a string by which errors tell clients apart.",
                "Pass for instance name='trainer'.",
            )
        seconds = _read_seconds(timeout_in_ms)
        self._name = name
        server = f"the server of client {name!r}" if name else "the rpc server"
        self._connection = connection = Connection(rpc_layer, address, server, seconds)
        self._address = address
        self._methods: dict[str, _MethodOfServer] = {}
        try:
            found = connection.list_methods()
        except BaseException:
            connection.close()
            raise
        for method, signature in found.items():
            start, block = _make_methods(connection, method, signature, address)
            self._methods[method], self._methods[f"{method}_blocking"] = start, block

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: float = 0) -> "Client":
        """Connect to a server, and ask for its methods.

        Args:
            rpc_layer: `"grpc"`; or `"local"` for a server of this process.
            address: Where the server listens. It may be about to start: this waits for it.
            name: The client in errors and in its `repr`.
            timeout_in_ms: How long creating the client and each call may take; 0 means
                `JAXDIST_RPC_SECONDS` (60 s), since a call without a deadline could wait forever.

        Returns:
            The client.

        Raises:
            ArgumentError: The layer, the address or the timeout is not valid.
            DeadlineExceededError: The server did not answer in time.
            UnauthenticatedError: The server has another secret.
            UnsupportedError: A function is being traced.
            MissingExtraError: grpcio is not installed.

        Example:
            >>> from jaxdist.experimental import rpc
            >>> rpc.Client.create("grpc", "localhost:1", timeout_in_ms=50)
            Traceback (most recent call last):
            jaxdist.errors.DeadlineExceededError: the rpc server at localhost:1 did not reply ...

        Source:
            `tf.distribute.experimental.rpc.Client.create`.
        """
        return Client(rpc_layer, address, name, timeout_in_ms)

    @called("Client.call")
    def call(
        self,
        method_name: str,
        args: Sequence[PyTree] | None = None,
        output_specs: PyTree = None,
        timeout_in_ms: float = 0,
    ) -> StatusOrResult:
        """Start a call of a function of the server, and return without waiting.

        Args:
            method_name: The name that the function is registered by.
            args: A list with the arguments: arrays and numbers in dicts with strings as keys,
                lists, tuples and None. They are copied here, so they may change afterwards.
            output_specs: A pytree of `jax.ShapeDtypeStruct` that describes the result; the value is
                returned in this structure. None gives the list of the arrays of the result, or
                None for a function without any.
            timeout_in_ms: How long this call may take; 0 means the timeout of the client.

        Returns:
            A `StatusOrResult`. Its status has what the server finds wrong, such as an unknown
            method or arguments that do not fit.

        Raises:
            ArgumentTypeError: An argument is something that cannot be sent.
            UnsupportedError: A function is being traced.

        Cost:
            One message and its reply. Arrays travel as they are in memory.

        Example:
            >>> from jaxdist.experimental import rpc
            >>> server = rpc.Server.create("grpc", "localhost:0")
            >>> server.register("get", lambda: {"x": 1, "y": 2})
            >>> server.start()
            >>> client = rpc.Client.create("grpc", server.address)
            >>> client.call("get").get_value()
            [array(1, dtype=int32), array(2, dtype=int32)]
            >>> client.call("nothing").get_error()[0]
            3
            >>> server.stop()

        Source:
            `tf.distribute.experimental.rpc.Client.call`.
        """
        check_text("method_name", method_name, "addition")
        if not is_sendable(method_name) or len(method_name) > 1000:
            raise refuse(
                f"method_name={show(method_name)}.",
                "It is the name of a method of the server.",
                "See print(client).",
            )
        given = () if args is None else args
        check_call_arguments(given, None)
        read = _make_reader(method_name, output_specs)
        return _start(self._connection, method_name, tuple(given), timeout_in_ms, read, None)

    def close(self) -> None:
        """Close the connection; calls that wait end with `UnavailableError`.

        A client closes by itself when nothing refers to it any more.
        """
        self._connection.close()

    def __getattr__(self, name: str) -> _MethodOfServer:
        methods: dict[str, _MethodOfServer] = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        raise MissingNameError(
            f"{self!r} has no method {name!r}.\n\n"
            f"The server has {sorted(set(methods) - {f'{m}_blocking' for m in methods})}.\n\n"
            "Call one of these, or create the client after the method was registered.",
            name=name,
            obj=self,
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        shown = f" {self._name!r}" if self._name else ""
        return f"<rpc.Client{shown} of {self.__dict__.get('_address')}>"


RESERVED = frozenset(dir(Client))


def _make_methods(
    connection: Connection, name: str, signature: Signature, address: str
) -> tuple[_MethodOfServer, _MethodOfServer]:
    """Return the two functions that a client has for a method."""

    def start(*args: PyTree, timeout_in_ms: float = 0, **unknown: Any) -> StatusOrResult:
        caller = f"Client.{name}"
        call_as(caller, _check_no_more, name, unknown, signature)
        return call_as(
            caller, _start, connection, name, args, timeout_in_ms, _read_whole, signature
        )

    def block(*args: PyTree, timeout_in_ms: float = 0, **unknown: Any) -> PyTree:
        call_as(f"Client.{name}_blocking", _check_no_more, name, unknown, signature)
        return start(*args, timeout_in_ms=timeout_in_ms).get_value()

    text = f"RPC Call for {name} method to server {address}"
    start.__doc__ = (
        f"{text}.\n\nIt takes {signature}, and returns a `StatusOrResult` without waiting."
    )
    block.__doc__ = f"{text}.\n\nIt takes {signature}, waits, and returns the value."
    for function, own in ((start, name), (block, f"{name}_blocking")):
        function.__name__, function.__qualname__ = own, f"Client.{own}"
    return start, block


def _check_no_more(name: str, unknown: Mapping[str, Any], signature: Signature) -> None:
    """Raise for keyword arguments other than `timeout_in_ms`."""
    if unknown:
        names = ", ".join(unknown)
        remedy = f"Leave {names} out: client.{name}()."
        if signature.leaves:
            remedy = f"Pass the values by place, without names: client.{name}(value, ...)."
        raise refuse(
            f"the keyword{'s' * (len(unknown) > 1)} {names}.",
            f"{name!r} takes its arguments {signature} by place, and timeout_in_ms by name.",
            remedy,
            kind=CallArgumentsError,
        )


def _start(
    connection: Connection,
    name: str,
    args: tuple[PyTree, ...],
    timeout_in_ms: Any,
    read: Callable[[Result], PyTree],
    signature: Signature | None,
) -> StatusOrResult:
    seconds = _read_seconds(timeout_in_ms)
    check_not_traced()
    structure, leaves = flatten("args", args)
    if signature is not None:
        signature.check_structure(name, structure, [leaf for _, leaf in leaves])
    pairs = [read_leaf(path, leaf)[::-1] for path, leaf in leaves]
    reply = connection.start(Call(name, structure, pairs), seconds)
    return StatusOrResult(reply, read, connection)


def _read_whole(reply: Result) -> PyTree:
    return unflatten(reply.structure, reply.arrays)


def _make_reader(name: str, output_specs: PyTree) -> Callable[[Result], PyTree]:
    if output_specs is None:
        return lambda reply: list(reply.arrays) or None
    structure, leaves = flatten("output_specs", output_specs)
    specs = [read_spec(*leaf) for leaf in leaves]

    @called("Client.call")
    def read(reply: Result) -> PyTree:
        found = [LeafSpec(str(x.dtype), x.shape) for x in reply.arrays]
        if len(found) != len(specs) or not all(map(_fits, specs, found)):
            raise refuse(
                f"output_specs with {_format(specs)}, and the result of {name!r} has "
                f"{_format(found)}.",
                "output_specs describe each array of the result.",
                "Pass jax.eval_shape(func, ...) of the function that is registered, or leave "
                "output_specs out.",
                kind=InvalidArgumentError,
            )
        return unflatten(structure, reply.arrays)

    return read


def _fits(spec: LeafSpec, found: LeafSpec) -> bool:
    return (
        spec.dtype == found.dtype
        and len(spec.dims) == len(found.dims)
        and all(isinstance(d, str) or d == n for d, n in zip(spec.dims, found.dims, strict=True))
    )


def _format(specs: Sequence[LeafSpec]) -> str:
    text = ", ".join(map(str, specs)) or "no arrays"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _read_seconds(timeout_in_ms: Any) -> float | None:
    """Return a timeout in seconds; None for 0, which means the default."""
    number = as_number("timeout_in_ms", timeout_in_ms, least=0, example=1000)
    return number / 1000 if number else None
