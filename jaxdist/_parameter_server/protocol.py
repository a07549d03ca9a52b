"""The requests to parameter servers, and their replies.

Each is sent as its fields are, in a message (`transport.requests`); in one process the same object
is given to the server itself. The meaning of a field is documented only here.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxdist._parameter_server.transport.requests import Array, Done, R, Reply, Request

WAIT_SECONDS = 60.0

_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class Waiting(Request[R], frozen=True, kw_only=True):
    """A request that the server may let wait for other closures, or work on for some time.

    Args:
        seconds: How long.
    """

    seconds: _Seconds = WAIT_SECONDS


class LongRequest(Waiting[R], frozen=True, kw_only=True):
    """A request that may take longer than the deadline of a message; see `LongCalls`.

    The server answers after `seconds` in any case, with `Pending` if it is not done.

    Args:
        request: The id of the call: a message with the same id starts nothing. Without one the call
            is not answered before its end.
    """

    request: _Name = ""


class Pending(Reply, frozen=True):
    """The reply to a long request that is not done.

    Args:
        state: `running`; or `unknown` after a restart: nobody works on it.
    """

    state: str


def as_array(content: bytes) -> Array:
    """Return bytes as an array, which is sent without a copy; `tobytes` gives them back."""
    return np.frombuffer(content, np.uint8)


# The identity of a server


class Restored(Reply, frozen=True):
    """The closures of a client that a restart of a server has found in its snapshot.

    Args:
        incarnation: The incarnation that began with it.
        below: All closures with lower numbers were finished.
        counted: The later ones that were counted.
    """

    incarnation: str
    below: int = 0
    counted: Sequence[int] = ()


class ServerInfo(Reply, frozen=True, kw_only=True):
    """The identity of a server. A task of another job returns only its name.

    Args:
        task: The name of the task, such as `ps:0`.
        incarnation: The id of this start, to which versions belong.
        max_staleness: The bound; None means none.
        applied: How many requests to change variables were applied, over all incarnations.
        variables: How many variables it has.
        snapshot: Number (`step`), `folder` and `applied` of the snapshot that it has started from.
        versions: The versions that this start has served first.
        restored: The variables that come from that snapshot.
        has_snapshots: Whether it writes snapshots.
        restores: What each restart has found, the oldest first.
    """

    task: str
    incarnation: str = ""
    max_staleness: int | None = None
    applied: int = 0
    variables: int = 0
    snapshot: Mapping[str, Any] | None = None
    versions: Mapping[str, int] = {}
    restored: Sequence[str] = ()
    has_snapshots: bool = False
    restores: Sequence[Restored] = ()


class Hello(Request[ServerInfo], frozen=True):
    """Asks who the server is, and from which versions it serves.

    Args:
        client: The client whose counted closures the reply lists, for each restart from a
            snapshot. Its own variables are not among those that are `restored` from one.
    """

    method = "hello"

    client: _Name = ""


class Configure(Request[Done], frozen=True):
    """Sets the bound of staleness; where it is another one, no closure is registered any more."""

    method = "configure"

    max_staleness: _Count | None = None


# Making variables


class Creation(msgspec.Struct, frozen=True, array_like=True):
    """A variable to create.

    Args:
        name: The name.
        value: The value.
        program: Instead of a value the bytes of a `jax.export` function without arguments that
            returns it; see `as_array`.
    """

    name: _Name
    value: Array | None = None
    program: Array | None = None


class Created(Reply, frozen=True):
    """The reply to a creation.

    Args:
        made: For each name whether it is new, and its version.
    """

    made: Mapping[str, tuple[bool, int]]


class Create(LongRequest[Created], frozen=True):
    """Creates variables; those that exist with the same shape and dtype stay as they are.

    Args:
        variables: The variables.
        client: Who creates them.
    """

    method = "create"

    variables: Sequence[Creation]
    client: _Name = ""

    def list_names(self) -> list[str]:
        """Return the names of what it makes."""
        return [variable.name for variable in self.variables]


class RegisterUpdate(LongRequest[Created], frozen=True):
    """Adds an update program, and the slots of the variables that it changes.

    Args:
        key: The name of the program: a change of it has the operation `program:<key>`.
        program: The bytes of a `jax.export` function
            `f(value, *slots, *operands) -> (value, *slots)`.
        num_slots: How many slots it has.
        variables: The variables, and for each the first values of its slots; None where `init`
            makes them.
        init: The bytes of a `jax.export` function `init(value) -> slots`.
        prefix: The names of the slots of `w` are `w/slot_0` and so on, with this prefix.
        client: Who registers it.
    """

    method = "register_update"

    key: _Name
    program: Array
    num_slots: _Count
    variables: Mapping[_Name, Sequence[Array] | None]
    init: Array | None = None
    prefix: _Name = "slot"
    client: _Name = ""

    def list_names(self) -> list[str]:
        """Return the names of what it makes: of the slots."""
        slots = range(self.num_slots)
        return [f"{name}/{self.prefix}_{n}" for name in self.variables for n in slots]


# Reading and changing


class Values(Reply, frozen=True):
    """The reply to a read.

    Args:
        incarnation: The server's id; versions of another incarnation count other changes.
        versions: The version of each variable.
        values: The values that the caller did not know yet. Nobody writes into them.
        is_registered: Whether the closure is registered with this read.
    """

    incarnation: str
    versions: Mapping[str, int]
    values: Mapping[str, Array]
    is_registered: bool = False


class Read(Waiting[Values], frozen=True):
    """Reads values and versions, all of one moment.

    Args:
        names: The variables to read.
        client: The client that scheduled the closure.
        closure: The number of the closure that reads; None registers nothing.
        register: More variables that the closure will change, or read rows of. A closure reads once
            on each server, and names all variables that it changes there.
        known: The versions that the caller has; values of the same version are not returned.
        incarnation: The incarnation of the known versions. Others are ignored.
    """

    method = "read"

    names: Sequence[_Name]
    client: _Name = ""
    closure: _Count | None = None
    register: Sequence[_Name] = ()
    known: Mapping[_Name, _Count] = {}
    incarnation: _Name | None = None


class Rows(Reply, frozen=True):
    """Rows, and the version of their variable."""

    rows: Array
    version: int
    incarnation: str


class ReadRows(Request[Rows], frozen=True):
    """Reads rows of a variable, in the order of `ids`."""

    method = "read_rows"

    name: _Name
    ids: Array


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One change of one variable.

    Args:
        op: One of `stored.DENSE` and `stored.ROWS`, or `program:<key>`.
        name: The variable.
        operands: The arrays of the operation: one of the variable's shape for a dense operation;
            ids and rows for one of rows; those of an update program.
        version: The version of the variable that the operands were computed from; None if they
            were computed from no read.
    """

    op: _Name
    name: _Name
    operands: Sequence[Array]
    version: _Count | None = None


class Changed(Values, frozen=True):
    """The reply to changes.

    Args:
        status: `counted`, `already counted`, `finished` or `too stale`; only `counted` was applied
            now.
        staleness: The staleness of each change; None for one that was computed from no read.
    """

    status: str = ""
    staleness: Sequence[int | None] = ()


class ChangeVariables(Waiting[Changed], frozen=True):
    """Applies the changes of a closure once, and returns the values asked for.

    A repeated request, or one of a closure that nobody waits for any more, changes nothing.
    After the request the closure is no longer registered.

    Args:
        changes: The changes, in their order. All changes of one variable in one request are one
            version.
        client: The client that scheduled the closure.
        closure: The number of the closure, which sends one request to each server; None is always
            applied.
        done_below: All closures of the client with lower numbers are finished.
        incarnation: The incarnation of the versions in `changes` and `known`.
        read: Variables to read afterwards.
        known: As in `Read`.
    """

    method = "change"

    changes: Sequence[Change]
    client: _Name = ""
    closure: _Count | None = None
    done_below: _Count = 0
    incarnation: _Name | None = None
    read: Sequence[_Name] = ()
    known: Mapping[_Name, _Count] = {}


class Released(Reply, frozen=True):
    """Whether the closure had any reads. Without `max_staleness` no closure has any."""

    was_registered: bool


class Release(Request[Released], frozen=True):
    """Removes the reads of a closure that will not change anything."""

    method = "release"

    client: _Name
    closure: _Count


# Counts and snapshots


class VariableStatistics(Reply, frozen=True):
    """The counts of one variable; `applied` counts the changes of this incarnation."""

    version: int
    applied: int
    bytes: int
    staleness: Mapping[int, int]


class ServerStatistics(Reply, frozen=True, kw_only=True):
    """The counts of a server.

    Args:
        incarnation: Its incarnation.
        applied: How many requests to change variables were applied, over all incarnations.
        already_counted: How many were repeated.
        staleness: Staleness of a change -> number of changes.
        staleness_of: The same for the changes of each client.
        variables: Of each variable.
        snapshots: The last snapshot (`saved`), and why a later one failed (`failure`).
    """

    incarnation: str
    applied: int
    already_counted: int
    staleness: Mapping[int, int]
    staleness_of: Mapping[str, Mapping[int, int]]
    variables: Mapping[str, VariableStatistics]
    snapshots: Mapping[str, Any] | None


class GetStatistics(Request[ServerStatistics], frozen=True):
    """Asks for counts, and the histogram of staleness."""

    method = "statistics"


class Saved(Reply, frozen=True):
    """The number of a snapshot, and how many requests it has."""

    step: int
    applied: int


class WriteSnapshot(LongRequest[Saved], frozen=True):
    """Writes a snapshot."""

    method = "snapshot"


class WaitForCall(LongRequest[Reply], frozen=True):
    """Asks for the reply to the long request with this id."""

    method = "wait"


# Workers that join


class Announced(Reply, frozen=True):
    """The address of each worker that was heard of in the last 10 s."""

    workers: Mapping[int, str]


class Announce(Request[Done], frozen=True):
    """Announces a worker: its index, and where a coordinator reaches it."""

    method = "announce"

    worker: _Index
    address: _Name


class ListAnnounced(Request[Announced], frozen=True):
    """Asks for the workers that have announced themselves."""

    method = "list_announced"
