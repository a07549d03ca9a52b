"""Requests and replies as values: a `msgspec.Struct` of each kind, whose arrays are marked by type.

A request knows the name of its method and the type of its reply. So neither the caller, nor the
other task, nor the message needs a list of its fields: `make_message` and `read_message` use the
types. An array is a field of the type `Array`, at any depth. The fields of the message hold its
number among the arrays of the message, which travel as they are.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec
import numpy as np

from jaxdist._called import call_as, called, refuse
from jaxdist._parameter_server.transport.message import Channel, Handler, Message
from jaxdist.errors import ProgramMismatchError, ShapeError

Array = np.ndarray


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The answer to a request."""


R = TypeVar("R", bound=Reply)
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class Request(
    msgspec.Struct, Generic[R], frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A request of one task to another; the reply has the type in brackets.

    Attributes:
        method: Its name in messages.
    """

    method: ClassVar[str]


class Done(Reply, frozen=True):
    """The reply to a request that asks for nothing."""


@functools.cache
def get_reply_kind(kind: type[Request[R]]) -> type[R]:
    """Return the type of the reply to a kind of requests."""
    (found,) = get_args(kind.__orig_bases__[0])
    return found


def make_message(method: str, value: msgspec.Struct) -> Message:
    """Return a request or a reply as a message. Its arrays are not copied."""
    arrays: list[np.ndarray] = []

    def place(array: Any) -> int:
        arrays.append(np.asarray(array))
        return len(arrays) - 1

    fields = msgspec.to_builtins(value, enc_hook=place, str_keys=True)
    return Message(method, fields, tuple(arrays))


@called(lambda message: message.method)
def read_message(kind: type[S], message: Message) -> S:
    """Return the request or the reply in a message.

    Raises:
        msgspec.ValidationError: Its fields are not those of the kind.
        ShapeError: It has another number of arrays than its fields describe.
    """
    arrays, taken = message.arrays, set[int]()

    def find(wanted: type, number: Any) -> np.ndarray:
        if type(number) is not int or number < 0 or number in taken:
            raise msgspec.ValidationError("Expected the number of an array")
        taken.add(number)
        # The numbers are compared with the arrays when all of them are known.
        return arrays[number] if number < len(arrays) else np.empty(0)

    value = msgspec.convert(message.fields, kind, dec_hook=find, str_keys=True)
    if len(taken) != len(arrays) or any(number >= len(arrays) for number in taken):
        raise refuse(
            f"{len(arrays)} arrays.",
            f"Its fields describe {len(taken)}.",
            "Send one array for each that the fields describe.",
            kind=ShapeError,
        )
    return value


def read_reply(kind: type[S], message: Message) -> S:
    """Return the reply in a message.

    Raises:
        ProgramMismatchError: It is not a reply of this kind.
    """
    try:
        return read_message(kind, message)
    except (msgspec.ValidationError, ShapeError) as error:
        raise ProgramMismatchError(
            f"The reply to {message.method!r} is not valid: {error}\n\n"
            "Tasks of one job understand the same messages.\n\n"
            "Install the same version of jaxdist for all of them."
        ) from error


def call(channel: Channel, request: Request[R], seconds: float | None = None) -> R:
    """Send a request over a channel, and return the reply.

    Raises:
        JaxdistError: As from `Channel.call`.
        ProgramMismatchError: The reply is not one to this request.
    """
    return read_reply(
        get_reply_kind(type(request)), channel.call(make_message(request.method, request), seconds)
    )


def find_result(future: "Future[T]", seconds: float, if_not: T) -> T:
    """Return the result of a future; if it has none after some seconds, return `if_not`."""
    try:
        return future.result(seconds)
    except TimeoutError:
        # The work may have raised one, too.
        return future.result() if future.done() else if_not


def make_handlers(
    kinds: Iterable[type[Request[Any]]], answer: Callable[[Any], Reply], tasks: str
) -> dict[str, Handler]:
    """Return handlers that read requests, and send what a function answers.

    Args:
        kinds: The requests.
        answer: Returns the reply to a request of one of these kinds.
        tasks: The two tasks, for errors: `Caller and server`.

    Raises:
        ArgumentError: From a handler: the fields are not those of the request.
        ShapeError: From a handler: the number of arrays is not what the fields say.
    """
    return {kind.method: _make_handler(kind, answer, tasks) for kind in kinds}


def _make_handler(kind: type[Request[Any]], answer: Callable[[Any], Reply], tasks: str) -> Handler:
    method, fields = kind.method, ", ".join(kind.__struct_fields__) or "none"

    def handle(message: Message) -> Message:
        try:
            request = read_message(kind, message)
        except msgspec.ValidationError as error:
            raise call_as(
                method,
                refuse,
                f"fields that are not valid: {error}.",
                f"Its fields are {fields}.",
                f"{tasks} are of one version of jaxdist: compare `jaxdist --version`.",
            ) from error
        return make_message(method, answer(request))

    return handle
