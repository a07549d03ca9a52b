"""The functions of one server, its answers to calls, and their status codes."""

import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import msgspec

from jaxdist import _compat, errors
from jaxdist._called import called, refuse
from jaxdist._parameter_server.rpc.signature import Signature, make_signature
from jaxdist._parameter_server.rpc.values import NUMBERS, Kind, flatten, read_leaf
from jaxdist._parameter_server.transport.requests import Array, Reply, Request
from jaxdist._typing import PyTree
from jaxdist._validate import as_array, show

_LOG = logging.getLogger("jaxdist")
OK, UNKNOWN, INVALID_ARGUMENT = 0, 2, 3
# The first class that fits; every other error of jaxdist is of a built-in class of _BUILT_IN.
_CODES: tuple[tuple[type[errors.JaxdistError], int], ...] = (
    (errors.CancelledError, 1),
    (errors.DeadlineExceededError, 4),
    (errors.NotFoundError, 5),
    (errors.ProgramMismatchError, 9),
    (errors.ContextError, 9),
    (errors.OutOfRangeError, 11),
    (errors.UnsupportedError, 12),
    (errors.UnavailableError, 14),
    (errors.UnauthenticatedError, 16),
)
# The classes that TensorFlow's `py_function` gives to errors of Python.
_BUILT_IN: tuple[tuple[type[Exception], type[errors.JaxdistError]], ...] = (
    (NotImplementedError, errors.UnsupportedError),
    (TypeError, errors.InvalidArgumentError),
    (ValueError, errors.InvalidArgumentError),
    (StopIteration, errors.OutOfRangeError),
)


def get_code(error: errors.JaxdistError) -> int:
    """Return the status code of an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError)) else UNKNOWN


def as_own_error(method: str, error: BaseException) -> errors.JaxdistError:
    """Return an error of a registered function as one that can be sent; log its traceback."""
    if isinstance(error, errors.JaxdistError):
        return error
    _LOG.error("The function of %r raised:", method, exc_info=error)
    kind = next(
        (own for built_in, own in _BUILT_IN if isinstance(error, built_in)), errors.UnknownError
    )
    return kind(
        f"The function of {method!r} raised {show(error)}.\n\n"
        "The server answers with the error of its function, and continues.\n\n"
        "Its log has the traceback."
    )


class MethodList(Reply, frozen=True):
    """The functions of a server.

    Args:
        methods: The name of each, and its signature.
    """

    methods: Sequence[tuple[str, Signature]]


class ListMethods(Request[MethodList], frozen=True):
    """Asks which functions there are, and what they take."""

    method = "rpc/list"


class Result(Reply, frozen=True):
    """The result of a function: its structure, and the arrays in it."""

    structure: Any
    arrays: Sequence[Array]


class Call(Request[Result], frozen=True):
    """Calls a function.

    Args:
        name: Its name.
        structure: That of its arguments.
        leaves: How each leaf of them was given, and the leaf.
        seconds: How long the caller waits.
    """

    method = "rpc/call"

    name: str
    structure: Any
    leaves: Sequence[tuple[Kind, Array]]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0


@dataclasses.dataclass(frozen=True)
class Method:
    """A registered function, what it takes, and JAX's settings where it was registered."""

    function: Callable[..., Any]
    signature: Signature
    is_concurrent: bool
    settings: _compat.ThreadSettings = dataclasses.field(default_factory=_compat.ThreadSettings)


class Methods(dict[str, Method]):
    """The functions of one server, by name.

    A class of its own, so that the threads that answer do not keep the server alive.
    """

    def __init__(self) -> None:
        super().__init__()
        # Two calls at the same time could read a variable and overwrite each other's change.
        self._turn = threading.Lock()

    def answer(self, request: Call | ListMethods) -> Reply:
        """Answer a request."""
        if isinstance(request, Call):
            return self._call(request)
        return MethodList([(name, method.signature) for name, method in self.items()])

    @called("A call")
    def _call(self, request: Call) -> Result:
        name = request.name
        method = self.get(name)
        if method is None:
            raise refuse(
                f"method_name={name[:80]!r}, which this server does not have.",
                f"Its methods are {sorted(self)}.",
                "Call one of these, or register it before the server is started.",
                kind=errors.InvalidArgumentError,
            )
        # A thread of the server answers. The signature was checked where `register` was called.
        with method.settings.use(), contextlib.ExitStack() as stack:
            args = method.signature.read_arguments(name, request.structure, request.leaves)
            if not method.is_concurrent:
                self._wait(name, request.seconds)
                stack.callback(self._turn.release)
            try:
                result = method.function(*args)
                # Some errors appear only when the result is computed.
                result = jax.block_until_ready(result)
            except BaseException as error:
                own = as_own_error(name, error)
                raise own from (None if own is error else error)
            return _make_result(name, result)

    def _wait(self, name: str, seconds: float) -> None:
        if not self._turn.acquire(timeout=seconds):
            raise errors.DeadlineExceededError(
                f"{name!r} did not start within {seconds:g} s: another call was running.\n\n"
                "The functions of a server run one after the other, unless they are registered "
                "with concurrent=True. This one has done nothing.\n\nCall again, with a longer "
                "timeout_in_ms=."
            )


def make_method(name: str, func: Any, input_signature: Any, concurrent: bool) -> Method:
    """Return a function with what it takes.

    Raises:
        ArgumentError: The signature is missing, or has another number of arguments.
    """
    if isinstance(func, jax.stages.Compiled):
        return Method(func, _read_compiled(name, func, input_signature), concurrent)
    try:
        parameters: inspect.Signature | None = inspect.signature(func)
    except (TypeError, ValueError):  # a function in C without a signature
        parameters = None
    if input_signature is None:
        if parameters is None or parameters.parameters:
            raise refuse(
                f"the method {name!r} without input_signature=, and its function has "
                f"{'arguments' if parameters is None else str(parameters)}.",
                "The server checks a call before it runs anything, so it has to know the dtype "
                "and shape of each argument. Type hints say neither.",
                "Pass input_signature=[jax.ShapeDtypeStruct((), jnp.int32), ...], or a function "
                "that was compiled by jax.jit(func).lower(...).compile().",
            )
        input_signature = ()
    signature = make_signature(input_signature)
    if parameters is not None:
        try:
            parameters.bind(*input_signature)
        except TypeError as error:
            raise refuse(
                f"the method {name!r} with {len(input_signature)} argument(s) in input_signature, "
                f"and its function has {parameters}: {error}.",
                "Clients pass the arguments of input_signature, all by position.",
                "Describe each argument of the function in input_signature.",
            ) from None
    return Method(func, signature, concurrent)


def _read_compiled(name: str, func: jax.stages.Compiled, input_signature: Any) -> Signature:
    args, kwargs = func.args_info
    if input_signature is not None or kwargs:
        what = "input_signature=" if input_signature is not None else f"arguments {sorted(kwargs)}"
        raise refuse(
            f"the compiled function {name!r} with {what}.",
            "A compiled function has its shapes and dtypes already, and clients pass arguments by "
            "position.",
            "Leave input_signature= out, and compile a function of positional arguments.",
        )
    return make_signature(args)


@called(lambda name: f"The function of {name!r}")
def _make_result(name: str, result: PyTree) -> Result:
    try:
        structure, leaves = flatten("result", result)
        arrays = []
        for path, leaf in leaves:
            # Numbers become what JAX makes of them, as in a compiled function.
            is_number = type(leaf) in NUMBERS.values()
            value = as_array(path, leaf) if is_number else leaf
            arrays.append(read_leaf(path, value)[0])
    except errors.JaxdistError as error:
        raise errors.UnsupportedError(
            str(error).replace(" was given result", " returned result", 1)
        ) from None
    return Result(structure, arrays)
