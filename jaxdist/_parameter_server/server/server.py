"""`VariableServer`: the variables of one server."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist._called import called, refuse
from jaxdist._parameter_server import protocol
from jaxdist._parameter_server.server.changing import (
    Changing,
    LostValuesError,
    add_update,
    add_variables,
    make_values,
)
from jaxdist._parameter_server.server.programs import Initialiser, UpdateProgram
from jaxdist._parameter_server.server.snapshots import Captured, SnapshotKeeper, capture
from jaxdist._parameter_server.server.staleness import Admission
from jaxdist._parameter_server.server.state import State
from jaxdist._parameter_server.server.stored import check_ids, check_name, find_variable
from jaxdist._parameter_server.transport.requests import Done, R, Request
from jaxdist._validate import as_integer
from jaxdist.errors import ContextError, UnavailableError

# How long a closure stays registered, if it neither changes the variables nor is released.
HOLD_SECONDS = 600.0


class VariableServer:
    """The variables of one server of a job.

    Guarantees:
        A request is applied as a whole or not at all, and a reader sees none of it or all of it.
        A closure that is sent several times counts once, also after a restart from a snapshot.
        With `max_staleness=s`, between the read that a change was computed from and the change
        itself there are at most s changes of the variable.

    Args:
        task: The name of the task, such as `ps:0`.
        max_staleness: The bound; None means none.
        snapshot_directory: The folder of the snapshots of all servers of the job; each has its own
            in it. If it has one of this server, the server begins with it. None means no snapshots.
        snapshot_seconds: How often a snapshot is written, if something changed.
        clock: Returns the time in seconds.

    Raises:
        CheckpointError: The folder cannot be used, or has a snapshot of other variables.
        DamagedCheckpointError: The newest snapshot is damaged.
    """

    @called("VariableServer")
    def __init__(
        self,
        task: str = "ps:0",
        *,
        max_staleness: int | None = None,
        snapshot_directory: str | Path | None = None,
        snapshot_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task = task
        # One lock: changes of one variable cannot run at the same time anyway, and a request of
        # several variables is atomic.
        self._condition = threading.Condition()
        self._state = State()
        self._broken: str | None = None
        self._keeper: SnapshotKeeper | None = None
        self._admission: Admission | None = None
        if max_staleness is not None:
            max_staleness = as_integer("max_staleness", max_staleness, least=0)
        self._clock = clock
        if snapshot_directory is not None:
            folder = Path(snapshot_directory)
            self._keeper = SnapshotKeeper(folder, task, snapshot_seconds, self._capture)
            self._state = self._keeper.state
            if max_staleness is None:
                max_staleness = self._state.max_staleness
        self._set_bound(max_staleness)
        if self._keeper is not None:
            self._keeper.start()

    @property
    def incarnation(self) -> str:
        """The id of this start of the server, to which versions belong."""
        return self._state.incarnation

    @property
    def max_staleness(self) -> int | None:
        """The bound; None means none."""
        return self._state.max_staleness

    def call(self, request: Request[R]) -> R:
        """Return the reply to a request; `protocol` says what each means.

        Raises:
            JaxdistError: The request is not valid. Nothing is changed.
        """
        return ANSWERS[type(request)](self, request)

    def _set_bound(self, bound: int | None) -> None:
        self._state.max_staleness = bound
        self._admission = (
            None
            if bound is None
            else Admission(self._condition, bound, self._clock, self._check_values)
        )

    def snapshot(self) -> dict[str, Any]:
        """Write a snapshot, and return its number and how many requests it has.

        Raises:
            ContextError: The server has no `snapshot_directory`.
            CheckpointError: It cannot be written.
        """
        if self._keeper is None:
            raise ContextError(
                f"snapshot was called, and server {self.task!r} has no snapshot_directory.\n\n"
                "Snapshots are written into the folder that the server was started with.\n\n"
                "Start it with snapshot_directory='runs/snapshots'."
            )
        return self._keeper.save()

    def close(self) -> None:
        """Write a last snapshot if something changed, and release the folder.

        Raises:
            CheckpointError: The snapshot cannot be written.
        """
        if self._keeper is not None:
            self._keeper.close()

    @called("configure")
    def _configure(self, request: protocol.Configure) -> Done:
        bound = request.max_staleness
        if bound is not None:
            bound = as_integer("max_staleness", bound, least=0)
        with self._condition:
            if bound != self._state.max_staleness:
                self._set_bound(bound)
                self._state.mutations += 1
                self._condition.notify_all()
        return Done()

    def _hello(self, request: protocol.Hello) -> protocol.ServerInfo:
        client = request.client
        with self._use():
            state = self._state
            found = state.variables.items()
            return protocol.ServerInfo(
                task=self.task,
                incarnation=state.incarnation,
                max_staleness=state.max_staleness,
                applied=state.applied,
                variables=len(state.variables),
                snapshot=None if self._keeper is None else self._keeper.start_from,
                versions={name: v.start_version for name, v in found},
                restored=[
                    name
                    for name, v in found
                    if v.snapshot is not None and (not client or v.creator != client)
                ],
                has_snapshots=self._keeper is not None,
                restores=[
                    protocol.Restored(r.incarnation, **r.counted.get(client, {}))
                    for r in state.restores
                ],
            )

    @called("create")
    def _create(self, request: protocol.Create) -> protocol.Created:
        # Outside the lock, since compiling an initialiser takes long.
        values = make_values(request.variables)
        with self._use():
            return add_variables(self._state, values, request.client)

    @called("register_update")
    def _register_update(self, request: protocol.RegisterUpdate) -> protocol.Created:
        key = check_name("key", request.key)
        with self._use():
            found = self._state.programs.get(key)
        program = UpdateProgram.prepare(request, found)
        what = f"the initialiser of program {key!r}"
        content = request.init
        init = None if content is None else Initialiser(what, content.tobytes())
        with self._use():
            return add_update(self._state, program, request, init)

    @called("read")
    def _read(self, request: protocol.Read) -> protocol.Values:
        with self._use():
            names = [*request.names, *request.register]
            self._state.get_versions(names)
            is_registered = self._admission is not None and request.closure is not None
            if self._admission is not None and request.closure is not None:
                own = (request.client, request.closure)
                get_versions = functools.partial(self._state.get_versions, names)
                self._admission.admit(own, get_versions, request.seconds, HOLD_SECONDS)
            found = self._collect(request.names, request.known, request.incarnation)
            return protocol.Values(*found, is_registered)

    @called("read_rows")
    def _read_rows(self, request: protocol.ReadRows) -> protocol.Rows:
        with self._use():
            found = find_variable(self._state.variables, request.name)
            ids = check_ids(found, request.ids)
            return protocol.Rows(found.peek()[ids], found.version, self._state.incarnation)

    @called("change")
    def _change(self, request: protocol.ChangeVariables) -> protocol.Changed:
        closure, done_below = request.closure, request.done_below
        if closure is not None and done_below > closure:
            raise refuse(
                f"closure={closure} and done_below={done_below}.",
                "Closures below done_below are finished, and this one is not.",
                f"Pass done_below={closure} or less.",
            )
        with self._use():
            self._state.get_versions(request.read)
            changing = Changing(self._state, request)
            try:
                status = changing.run(self._admission)
            except LostValuesError as error:
                self._broken = str(error)
                self._condition.notify_all()
                raise _make_broken_error(self._broken) from error
            self._state.counted.forget_below(request.client, done_below)
            if self._admission is not None and closure is not None:
                self._admission.release((request.client, closure))
            found = self._collect(request.read, request.known, request.incarnation)
            return protocol.Changed(*found, False, status, tuple(changing.staleness))

    def _release(self, request: protocol.Release) -> protocol.Released:
        with self._use():
            admission, own = self._admission, (request.client, request.closure)
            return protocol.Released(admission is not None and admission.release(own))

    def _get_statistics(self, request: protocol.GetStatistics) -> protocol.ServerStatistics:
        with self._use():
            snapshots = None if self._keeper is None else self._keeper.describe()
            return self._state.describe(snapshots)

    def _write_snapshot(self, request: protocol.WriteSnapshot) -> protocol.Saved:
        return protocol.Saved(**self.snapshot())

    def _capture(self, unless: int | None) -> Captured | None:
        # A server without its values would replace the good snapshots.
        with self._use():
            same = self._state.mutations == unless
            return None if same else capture(self._state, self.task)

    def _collect(
        self, names: Sequence[str], known: Mapping[str, int], incarnation: str | None
    ) -> tuple[str, dict[str, int], dict[str, np.ndarray]]:
        found = {n: self._state.variables[n] for n in names}
        kept = known if incarnation == self._state.incarnation else {}
        versions = {name: v.version for name, v in found.items()}
        values = {n: v.read() for n, v in found.items() if kept.get(n) != v.version}
        return self._state.incarnation, versions, values

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Hold the lock of a server that has its values."""
        with self._condition:
            self._check_values()
            yield

    def _check_values(self) -> None:
        if self._broken is not None:
            raise _make_broken_error(self._broken)


ANSWERS: Mapping[type[Request[Any]], Callable[[VariableServer, Any], Any]] = {
    protocol.Hello: VariableServer._hello,
    protocol.Configure: VariableServer._configure,
    protocol.Create: VariableServer._create,
    protocol.RegisterUpdate: VariableServer._register_update,
    protocol.Read: VariableServer._read,
    protocol.ReadRows: VariableServer._read_rows,
    protocol.ChangeVariables: VariableServer._change,
    protocol.Release: VariableServer._release,
    protocol.GetStatistics: VariableServer._get_statistics,
    protocol.WriteSnapshot: VariableServer._write_snapshot,
}


def _make_broken_error(why: str) -> UnavailableError:
    return UnavailableError(
        f"This server lost values in an update program: {why}.\n\n"
        "A program takes the memory of the old values, so they cannot be restored when it "
        "fails.\n\n"
        "Start the server again: it serves from its newest snapshot. Too little memory is the "
        "usual cause: put fewer variables on each server."
    )
