"""The functions of one server, and its answers to calls."""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxdist._parameter_server.rpc.codes import as_own_error
from jaxdist._parameter_server.rpc.signature import Signature, make_signature
from jaxdist._parameter_server.rpc.structures import flatten
from jaxdist._parameter_server.rpc.values import NUMBERS, read_leaf
from jaxdist._parameter_server.transport import Message
from jaxdist._typing import PyTree
from jaxdist._validate import as_array, show
from jaxdist.errors import (
    ArgumentError,
    DeadlineExceededError,
    InvalidArgumentError,
    JaxdistError,
    UnsupportedError,
)

CALL, LIST = "rpc/call", "rpc/list"


@dataclasses.dataclass(frozen=True)
class Method:
    """A registered function, and what it takes."""

    function: Callable[..., Any]
    signature: Signature
    is_concurrent: bool


class Methods:
    """The functions of one server.

    It is apart from the server, so that the threads that answer do not keep the server alive.
    """

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}
        # Two calls at a time would read a variable, and one of them would overwrite the other's.
        self._turn = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._methods

    def __len__(self) -> int:
        return len(self._methods)

    def add(self, name: str, method: Method) -> None:
        """Add a function."""
        self._methods[name] = method

    def list_all(self, request: Message) -> Message:
        """Answer which functions there are, and what they take."""
        found = [[name, method.signature.as_fields()] for name, method in self._methods.items()]
        return Message(LIST, {"methods": found})

    def call(self, request: Message) -> Message:
        """Call a function, and answer with its result."""
        fields = request.fields
        name = str(fields.get("name"))
        method = self._methods.get(name)
        if method is None:
            raise InvalidArgumentError(
                f"A call was given method_name={name[:80]!r}, which this server does not have.\n\n"
                f"Its methods are {sorted(self._methods)}.\n\n"
                "Call one of these, or register it before the server is started."
            )
        args = method.signature.read_arguments(name, fields, request.arrays)
        with contextlib.ExitStack() as stack:
            if not method.is_concurrent:
                self._wait(name, fields)
                stack.callback(self._turn.release)
            try:
                result = method.function(*args)
                # Also what fails only when the result is computed.
                result = jax.block_until_ready(result)
            except BaseException as error:
                own = as_own_error(name, error)
                raise own from (None if own is error else error)
            return _make_reply(name, result)

    def _wait(self, name: str, fields: Mapping[str, Any]) -> None:
        seconds = fields.get("seconds")
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            raise InvalidArgumentError(
                f"A call of {name!r} has seconds={show(seconds)}.\n\n"
                "A call says how long its caller waits.\n\n"
                "Install the same version of jaxdist for the server and its clients."
            )
        if not self._turn.acquire(timeout=seconds):
            raise DeadlineExceededError(
                f"{name!r} did not start within {seconds:g} s: another call was running.\n\n"
                "The functions of a server run one after the other, unless they are registered "
                "with concurrent=True. This one has done nothing.\n\nCall again, with a longer "
                "timeout_in_ms=."
            )


def make_method(name: str, func: Any, input_signature: Any, concurrent: bool) -> Method:
    """Return a function with what it takes.

    Raises:
        ArgumentError: There is no signature, or the function takes another number of arguments.
    """
    if isinstance(func, jax.stages.Compiled):
        return Method(func, _read_compiled(name, func, input_signature), concurrent)
    try:
        parameters: inspect.Signature | None = inspect.signature(func)
    except (TypeError, ValueError):  # a function in C that does not tell
        parameters = None
    if input_signature is None:
        if parameters is None or parameters.parameters:
            raise ArgumentError(
                f"Server.register was given the method {name!r} without input_signature=, and its "
                f"function has {'arguments' if parameters is None else str(parameters)}.\n\n"
                "The server checks a call before it runs anything, so it has to know the dtype and "
                "shape of each argument. Type hints say neither.\n\n"
                "Pass input_signature=[jax.ShapeDtypeStruct((), jnp.int32), ...], or a function "
                "that was compiled by jax.jit(func).lower(...).compile()."
            )
        input_signature = ()
    signature = make_signature(input_signature)
    if parameters is not None:
        try:
            parameters.bind(*input_signature)
        except TypeError as error:
            raise ArgumentError(
                f"Server.register was given the method {name!r} with {len(input_signature)} "
                f"argument(s) in input_signature, and its function has {parameters}: {error}.\n\n"
                "Clients pass the arguments of input_signature, all by position.\n\n"
                "Describe each argument of the function in input_signature."
            ) from None
    return Method(func, signature, concurrent)


def _read_compiled(name: str, func: jax.stages.Compiled, input_signature: Any) -> Signature:
    args, kwargs = func.args_info
    if input_signature is not None or kwargs:
        what = "input_signature=" if input_signature is not None else f"arguments {sorted(kwargs)}"
        raise ArgumentError(
            f"Server.register was given the compiled function {name!r} with {what}.\n\n"
            "A compiled function has its shapes and dtypes already, and clients pass arguments by "
            "position.\n\nLeave input_signature= out, and compile a function of positional "
            "arguments."
        )
    return make_signature(args)


def _make_reply(name: str, result: PyTree) -> Message:
    caller = f"The function of {name!r}"
    try:
        structure, leaves = flatten(caller, "result", result)
        arrays = []
        for path, leaf in leaves:
            # Numbers become what JAX makes of them, as in a compiled function.
            is_number = type(leaf) in NUMBERS.values()
            value = as_array(caller, path, leaf) if is_number else leaf
            arrays.append(read_leaf(caller, path, value)[0])
    except JaxdistError as error:
        raise UnsupportedError(
            str(error).replace(" was given result", " returned result", 1)
        ) from None
    return Message(CALL, {"structure": structure}, tuple(arrays))
