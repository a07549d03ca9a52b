"""`RemoteServer`: a server that is another task, as `ServerLink`."""

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist._parameter_server.server import Change, Changed, Creation, UpdateRegistration, Values
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._processes import get_settings
from jaxdist.errors import NotFoundError, PSUnavailableError, UnavailableError

# How long a server may work before it says that it still does.
_LONGEST_WAIT = 10.0
# The least that is expected of a network, for messages that hold whole variables.
_BYTES_PER_SECOND = 4e6


class RemoteServer:
    """A parameter server in another process: each method is one message.

    Args:
        channel: To the server.
        index: Its number among the servers.

    Attributes:
        incarnation: The start of the server to which the last reply belongs; "" before the first.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel, self._index = channel, index
        self.incarnation = ""

    def hello(self, client: str = "", seconds: float | None = None) -> dict[str, Any]:
        """Return who the server is, and what it has counted of a client's closures."""
        return dict(self._call("hello", {"client": client}, seconds=seconds).fields)

    def configure(self, max_staleness: int | None) -> None:
        """Set the bound of staleness."""
        self._call("configure", {"max_staleness": max_staleness})

    def snapshot(self) -> None:
        """Write a snapshot."""
        self._call_long("snapshot", {})

    def create(
        self, creations: Sequence[Creation], client: str = ""
    ) -> Mapping[str, tuple[bool, int]]:
        """Create variables."""
        variables = [{"name": c.name, "is_program": type(c.value) is bytes} for c in creations]
        arrays = [_to_array(c.value) for c in creations]
        return _read_created(
            self._call_long("create", {"variables": variables, "client": client}, arrays)
        )

    def register_update(
        self, registration: UpdateRegistration, client: str = ""
    ) -> Mapping[str, tuple[bool, int]]:
        """Add an update program."""
        made: dict[str, tuple[bool, int]] = {}
        # A message has first values for all of its variables, or an initialiser.
        for has_values in (True, False):
            own = {n: v for n, v in registration.variables.items() if (v is not None) == has_values}
            if own:
                init = None if has_values else registration.init
                made |= self._register(
                    dataclasses.replace(registration, variables=own, init=init), client
                )
        return made

    def _register(self, given: UpdateRegistration, client: str) -> Mapping[str, tuple[bool, int]]:
        programs = [given.program] if given.init is None else [given.program, given.init]
        slots = [x for own in given.variables.values() for x in own or ()]
        fields = {
            "key": given.key,
            "num_slots": given.num_slots,
            "variables": list(given.variables),
            "has_init": given.init is not None,
            "prefix": given.prefix,
            "client": client,
        }
        arrays = [*map(_to_array, programs), *map(np.asarray, slots)]
        return _read_created(self._call_long("register_update", fields, arrays))

    def read(
        self,
        names: Sequence[str],
        *,
        client: str = "",
        closure: int | None = None,
        register: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
        incarnation: str | None = None,
    ) -> Values:
        """Return values."""
        fields = {
            "names": list(names),
            "client": client,
            "closure": closure,
            "register": list(register),
            "known": dict(known or {}),
            "incarnation": incarnation,
            "seconds": _get_wait_seconds(),
        }
        reply = self._call("read", fields)
        return Values(**_read_values(reply))

    def read_rows(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Return rows."""
        reply = self._call("read_rows", {"name": name}, [ids])
        return reply.arrays[0], reply.fields["version"]

    def change(
        self,
        changes: Sequence[Change],
        *,
        client: str = "",
        closure: int | None = None,
        done_below: int = 0,
        incarnation: str | None = None,
        read: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
    ) -> Changed:
        """Apply changes."""
        described = [
            {"op": c.op, "name": c.name, "operands": len(c.operands), "version": c.version}
            for c in changes
        ]
        fields = {
            "changes": described,
            "client": client,
            "closure": closure,
            "done_below": done_below,
            "incarnation": incarnation,
            "read": list(read),
            "known": dict(known or {}),
            "seconds": _get_wait_seconds(),
        }
        reply = self._call("change", fields, [x for c in changes for x in c.operands])
        status, staleness = reply.fields["status"], tuple(reply.fields["staleness"])
        return Changed(**_read_values(reply), status=status, staleness=staleness)

    def release(self, client: str, closure: int) -> bool:
        """Remove the reads of a closure."""
        reply = self._call("release", {"client": client, "closure": closure})
        return bool(reply.fields["was_registered"])

    def statistics(self) -> Mapping[str, Any]:
        """Return counts."""
        return self._call("statistics", {}).fields

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call_long(
        self, method: str, fields: dict[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> Message:
        """Make a call that may take longer than the deadline of a message; see `LongCalls`."""
        own = {
            "request": secrets.token_hex(8),
            "seconds": min(_LONGEST_WAIT, _get_wait_seconds()),
        }
        deadline = get_settings().rpc_seconds + sum(x.nbytes for x in arrays) / _BYTES_PER_SECOND
        reply = self._call(method, {**fields, **own}, arrays, deadline)
        while state := reply.fields.get("state"):
            # A server that was started again knows nothing of the call.
            is_running = state == "running"
            reply = (
                self._call("wait", own)
                if is_running
                else self._call(method, {**fields, **own}, arrays, deadline)
            )
        return reply

    def _call(
        self,
        method: str,
        fields: dict[str, Any],
        arrays: Sequence[np.ndarray] = (),
        seconds: float | None = None,
    ) -> Message:
        try:
            reply = self._channel.call(Message(method, fields, tuple(arrays)), seconds)
        except UnavailableError as error:
            text = str(error).replace("This server", f"ps {self._index}", 1)
            raise PSUnavailableError(text, [self._index]) from error
        except NotFoundError as error:
            raise self._explain(error) from error
        self.incarnation = reply.fields.get("incarnation", self.incarnation)
        return reply

    def _explain(self, error: NotFoundError) -> NotFoundError:
        """Return a better error, if the server has lost its variables."""
        found = self.hello()
        if found["variables"]:
            return error
        remedy = (
            "Make its snapshots more often: snapshot_seconds=5."
            if found["has_snapshots"]
            else "Let servers write snapshots: jaxdist.Server(..., snapshot_directory='snapshots')."
        )
        return NotFoundError(
            f"ps {self._index} at {self._channel.address} was started again, and has no "
            "variables.\n\n"
            "A server that was started again has the variables of its newest snapshot, and this "
            f"one had none.\n\nStart the job again, from its last checkpoint. {remedy}"
        )


def _get_wait_seconds() -> float:
    """Return how long a server may let a call wait for other closures: less than its deadline."""
    return get_settings().rpc_seconds / 2


def _to_array(value: Any) -> np.ndarray:
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)


def _read_created(reply: Message) -> dict[str, tuple[bool, int]]:
    found: Mapping[str, Any] = reply.fields["variables"]
    return {name: (one["status"] == "created", one["version"]) for name, one in found.items()}


def _read_values(reply: Message) -> dict[str, Any]:
    fields = reply.fields
    arrays: Iterator[np.ndarray] = iter(reply.arrays)
    return {
        "incarnation": fields["incarnation"],
        "versions": fields["versions"],
        "values": {name: next(arrays) for name in fields["sent"]},
        "is_registered": fields["registered"],
    }
