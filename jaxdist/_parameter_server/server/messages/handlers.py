"""Messages of the variables of a server: their fields, and the handler of each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from jaxdist._parameter_server.server.messages.announced import Announced
from jaxdist._parameter_server.server.messages.long_calls import LongCalls, Reply
from jaxdist._parameter_server.server.requests import (
    Change,
    Changed,
    Creation,
    UpdateRegistration,
    Values,
)
from jaxdist._parameter_server.server.server import HOLD_SECONDS, WAIT_SECONDS, VariableServer
from jaxdist._parameter_server.transport import Handler, Message
from jaxdist.errors import ArgumentError, ShapeError

_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class _Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of a request. msgspec checks their names and types."""


class _NoFields(_Fields):
    """No fields."""


class _Hello(_Fields):
    client: _Name = ""


class _Configure(_Fields):
    max_staleness: _Count | None = None


class _NewVariable(_Fields):
    name: _Name
    is_program: bool = False


class _Long(_Fields):
    request: _Name = ""  # the id of a call that may take long
    seconds: _Seconds = WAIT_SECONDS


class _Create(_Long, kw_only=True):
    variables: list[_NewVariable]
    client: _Name = ""


class _Program(_Long, kw_only=True):
    key: _Name
    num_slots: _Count
    variables: list[_Name]
    has_init: bool = False  # whether the slots are made by a program instead of arrays
    prefix: _Name = "slot"
    client: _Name = ""


class _Read(_Fields):
    names: list[_Name]
    client: _Name = ""
    closure: _Count | None = None
    register: list[_Name] = []
    known: dict[_Name, _Count] = {}
    incarnation: _Name | None = None
    seconds: _Seconds = WAIT_SECONDS
    hold_seconds: _Seconds = HOLD_SECONDS


class _ReadRows(_Fields):
    name: _Name


class _OneChange(_Fields):
    op: _Name
    name: _Name
    operands: _Count
    version: _Count | None = None


class _Change(_Fields):
    changes: list[_OneChange]
    client: _Name = ""
    closure: _Count | None = None
    done_below: _Count = 0
    incarnation: _Name | None = None
    read: list[_Name] = []
    known: dict[_Name, _Count] = {}
    read_closure: _Count | None = None
    register: list[_Name] = []
    seconds: _Seconds = WAIT_SECONDS
    hold_seconds: _Seconds = HOLD_SECONDS


class _Release(_Fields):
    client: _Name
    closure: _Count


class _Names(_Fields):
    names: list[_Name]


class _Announce(_Fields):
    worker: _Index
    address: _Name


F = TypeVar("F", bound=_Fields)
_Arrays = Iterator[np.ndarray]


def make_handlers(server: VariableServer) -> dict[str, Handler]:
    """Return the handlers of the messages of a server, by method.

    The fields of each are in `docs/design/017-parameter-servers.md`.

    Raises:
        ArgumentError: From a handler: the fields are not those of the method.
        ShapeError: From a handler: the number of arrays is not what the fields say.
    """

    def hello(fields: _Hello, arrays: _Arrays) -> Reply:
        return server.hello(fields.client), ()

    def configure(fields: _Configure, arrays: _Arrays) -> Reply:
        server.configure(fields.max_staleness)
        return {}, ()

    def create(fields: _Create, arrays: _Arrays) -> Reply:
        creations = []
        for new in fields.variables:
            value = next(arrays)
            creations.append(Creation(new.name, value.tobytes() if new.is_program else value))
        return _describe_created(server.create(creations, fields.client))

    def register_update(fields: _Program, arrays: _Arrays) -> Reply:
        program = next(arrays).tobytes()
        init = next(arrays).tobytes() if fields.has_init else None
        slots = {
            name: None if fields.has_init else [next(arrays) for _ in range(fields.num_slots)]
            for name in fields.variables
        }
        registration = UpdateRegistration(
            fields.key, program, fields.num_slots, slots, init, fields.prefix
        )
        return _describe_created(server.register_update(registration, fields.client))

    def read(fields: _Read, arrays: _Arrays) -> Reply:
        return _describe_values(server.read(**_to_arguments(fields)))

    def read_rows(fields: _ReadRows, arrays: _Arrays) -> Reply:
        rows, version = server.read_rows(fields.name, next(arrays))
        return {"version": version, "incarnation": server.incarnation}, (rows,)

    def change(fields: _Change, arrays: _Arrays) -> Reply:
        arguments = _to_arguments(fields)
        arguments["changes"] = [
            Change(c.op, c.name, tuple(next(arrays) for _ in range(c.operands)), c.version)
            for c in fields.changes
        ]
        return _describe_values(server.change(**arguments))

    def release(fields: _Release, arrays: _Arrays) -> Reply:
        return {"was_registered": server.release(fields.client, fields.closure)}, ()

    def delete(fields: _Names, arrays: _Arrays) -> Reply:
        return {"deleted": server.delete(fields.names)}, ()

    def statistics(fields: _NoFields, arrays: _Arrays) -> Reply:
        return server.statistics(), ()

    def snapshot(fields: _Long, arrays: _Arrays) -> Reply:
        return server.snapshot(), ()

    def wait(fields: _Long, arrays: _Arrays) -> Reply:
        return calls.wait(fields.request, fields.seconds)

    def announce(fields: _Announce, arrays: _Arrays) -> Reply:
        announced.note(fields.worker, fields.address)
        return {}, ()

    def list_announced(fields: _NoFields, arrays: _Arrays) -> Reply:
        # Keys of JSON are texts.
        return {"workers": {str(n): a for n, a in announced.list_present().items()}}, ()

    calls, announced = LongCalls(), Announced()

    return dict(
        [
            _make_handler("hello", _Hello, hello),
            _make_handler("configure", _Configure, configure),
            _make_handler("create", _Create, _make_long(calls, create)),
            _make_handler("register_update", _Program, _make_long(calls, register_update)),
            _make_handler("read", _Read, read),
            _make_handler("read_rows", _ReadRows, read_rows),
            _make_handler("change", _Change, change),
            _make_handler("release", _Release, release),
            _make_handler("delete", _Names, delete),
            _make_handler("statistics", _NoFields, statistics),
            _make_handler("snapshot", _Long, _make_long(calls, snapshot)),
            _make_handler("wait", _Long, wait),
            _make_handler("announce", _Announce, announce),
            _make_handler("list_announced", _NoFields, list_announced),
        ]
    )


L = TypeVar("L", bound=_Long)


def _make_long(
    calls: LongCalls, answer: Callable[[L, _Arrays], Reply]
) -> Callable[[L, _Arrays], Reply]:
    return lambda fields, arrays: calls.run(
        fields.request, fields.seconds, lambda: answer(fields, arrays)
    )


def _make_handler(
    method: str, fields_type: type[F], answer: Callable[[F, _Arrays], Reply]
) -> tuple[str, Handler]:
    def handle(message: Message) -> Message:
        try:
            fields = msgspec.convert(dict(message.fields), fields_type)
        except msgspec.ValidationError as error:
            raise ArgumentError(
                f"{method} was given fields that are not valid: {error}.\n\n"
                f"Its fields are {', '.join(fields_type.__struct_fields__) or 'none'}.\n\n"
                "Caller and server are of one version of jaxdist: compare `jaxdist --version`."
            ) from error
        found, wanted = len(message.arrays), _count_arrays(fields)
        if found != wanted:
            raise ShapeError(
                f"{method} was given {found} arrays.\n\nIts fields describe {wanted}.\n\n"
                "Send one array for each that the fields describe."
            )
        return Message(method, *answer(fields, iter(message.arrays)))

    return method, handle


def _count_arrays(fields: _Fields) -> int:
    """Return how many arrays a request has, before any list of that length is made."""
    match fields:
        case _Create():
            return len(fields.variables)
        case _Program():
            slots = 0 if fields.has_init else fields.num_slots * len(fields.variables)
            return 1 + fields.has_init + slots
        case _ReadRows():
            return 1
        case _Change():
            return sum(change.operands for change in fields.changes)
    return 0


def _to_arguments(fields: _Fields) -> dict[str, Any]:
    return {name: getattr(fields, name) for name in fields.__struct_fields__}


def _describe_created(created: Mapping[str, tuple[bool, int]]) -> Reply:
    return {
        "variables": {
            name: {"status": "created" if is_new else "exists", "version": version}
            for name, (is_new, version) in created.items()
        }
    }, ()


def _describe_values(found: Values) -> Reply:
    fields: dict[str, Any] = {
        "incarnation": found.incarnation,
        "versions": dict(found.versions),
        "sent": list(found.values),
        "registered": found.is_registered,
    }
    if isinstance(found, Changed):
        fields |= {"status": found.status, "staleness": list(found.staleness)}
    return fields, tuple(found.values.values())
