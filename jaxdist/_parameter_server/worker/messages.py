"""Closures as messages: fields that JSON can hold, and programs as arrays of bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxdist._parameter_server.closures.traced import (
    Input,
    Lookup,
    Source,
    Structure,
    TracedClosure,
    Update,
)
from jaxdist._parameter_server.transport import Message
from jaxdist._parameter_server.variables.shard_rows import Part
from jaxdist.errors import ArgumentError


class LoadFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message that brings a closure.

    Args:
        client: Whose closure it is.
        name: As in `TracedClosure`, and so are the others.
        places: The number of the server of each variable.
        shapes: The batches that it takes, by iterator, as `describe_tree` describes them.
        parts: As in `TracedClosure`; each is the table, the first row, the rows, and all rows.
    """

    client: str
    name: str
    digest: str
    inputs: list[tuple[str, str, list[int]]]
    updates: list[tuple[str, str, list[int], int | None, bool, str]]
    num_results: int
    batches: list[int]
    lookup: list[tuple[str, str, list[int]]] | None
    places: dict[str, int]
    shapes: list[Any]
    parts: dict[str, tuple[str, int, int, int]] = {}


class RunFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message that runs a closure.

    Args:
        client: Who has numbered it.
        attempt: The number of this message among those of the client to this worker. A message
            that comes twice runs nothing.
        digest: Which closure.
        number: Its number.
        fence: Values that were kept from before it are read again.
        done_below: Closures with lower numbers are finished.
        iterators: The iterators that it takes batches from.
        arguments: For each argument None for the next array of the message, or the id of a value
            of this worker and the number of its leaf.
        forget: Values that nobody needs any more.
    """

    client: str
    attempt: int
    digest: str
    number: int
    fence: int
    done_below: int
    iterators: list[int]
    arguments: list[tuple[int, int] | None]
    forget: list[int] = []


class MakeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message that makes a dataset, or an iterator over one.

    Args:
        client: For whom.
        attempt: As in `RunFields`.
        number: What it is called from now on.
        functions: The names of a dataset function, as `module:qualname`.
        script: The script of the client, for a function of `__main__`.
        dataset: The number of the dataset to iterate over, if there is no function.
        forget: Values that nobody needs any more.
    """

    client: str
    attempt: int
    number: int
    functions: list[str] = []
    script: str = ""
    dataset: int | None = None
    forget: list[int] = []


class HelloFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message by which a coordinator greets a worker.

    Args:
        client: The id of its run.
        servers: The addresses of the parameter servers; None if the coordinator takes this task
            for one of them.
        max_staleness: Their bound.
    """

    client: str
    servers: list[str] | None = None
    max_staleness: int | None = None


class ClientFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message about one attempt, or one closure, of a client."""

    client: str
    attempt: int = 0
    number: int = 0


def to_fields(fields: msgspec.Struct) -> dict[str, Any]:
    """Return fields as a message holds them."""
    made: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(fields))
    return made


def make_load(
    client: str, closure: TracedClosure, places: Mapping[str, int], shapes: Sequence[Any]
) -> Message:
    """Return the message that brings a closure to a worker."""
    lookup = closure.lookup
    fields = LoadFields(
        client=client,
        name=closure.name,
        digest=closure.digest,
        inputs=[_describe_input(i) for i in closure.inputs],
        updates=[
            (u.op, u.name, list(u.operands), u.count, u.is_once, u.what) for u in closure.updates
        ],
        num_results=closure.num_results,
        batches=list(closure.batches),
        lookup=None if lookup is None else [_describe_input(i) for i in lookup.inputs],
        places=dict(places),
        shapes=list(shapes),
        parts={n: (p.table, p.start, p.rows, p.total) for n, p in closure.parts.items()},
    )
    programs = [closure.exported] if lookup is None else [closure.exported, lookup.exported]
    arrays = tuple(np.frombuffer(p, np.uint8) for p in programs)
    return Message("load", to_fields(fields), arrays)


def read_load(fields: LoadFields, arrays: Sequence[np.ndarray]) -> TracedClosure:
    """Return the closure of a message. What the function returns is known to the client only."""
    if len(arrays) != 1 + (fields.lookup is not None):
        raise ArgumentError(
            f"load was given {len(arrays)} programs.\n\n"
            f"Its fields describe {1 + (fields.lookup is not None)}.\n\n"
            "Send the program, and that of its lookup if it has one."
        )
    lookup = None
    if fields.lookup is not None:
        lookup = Lookup(arrays[1].tobytes(), tuple(_read_input(i) for i in fields.lookup))
    return TracedClosure(
        fields.name,
        arrays[0].tobytes(),
        fields.digest,
        tuple(_read_input(i) for i in fields.inputs),
        tuple(
            Update(op, name, tuple(operands), count, is_once, what)
            for op, name, operands, count, is_once, what in fields.updates
        ),
        fields.num_results,
        Structure(None, 0),
        tuple(fields.batches),
        1,
        lookup,
        {name: Part(*part) for name, part in fields.parts.items()},
    )


def list_variables(closure: TracedClosure) -> list[str]:
    """Return the names of all variables that a closure reads or changes."""
    inputs = [*closure.inputs, *(closure.lookup.inputs if closure.lookup else ())]
    of_server = (Source.VARIABLE, Source.ROWS)
    read = [i.name for i in inputs if i.source in of_server]
    return list(dict.fromkeys([*read, *(u.name for u in closure.updates)]))


def _describe_input(given: Input) -> tuple[str, str, list[int]]:
    return given.source.value, given.name, list(given.index)


def _read_input(given: tuple[str, str, list[int]]) -> Input:
    source, name, index = given
    return Input(Source(source), name, tuple(index))
