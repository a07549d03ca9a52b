"""`VariableServer`: the variables of one server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist._parameter_server.server import checks
from jaxdist._parameter_server.server.applying import LostValuesError
from jaxdist._parameter_server.server.changing import ChangeRequest
from jaxdist._parameter_server.server.creating import add_update, add_variables, make_values
from jaxdist._parameter_server.server.errors import make_broken_error
from jaxdist._parameter_server.server.programs import Initialiser, UpdateProgram
from jaxdist._parameter_server.server.requests import (
    Change,
    Changed,
    Creation,
    UpdateRegistration,
    Values,
)
from jaxdist._parameter_server.server.snapshots import Captured, SnapshotKeeper, capture
from jaxdist._parameter_server.server.staleness import Admission, GetVersions
from jaxdist._parameter_server.server.state import State
from jaxdist._validate import as_integer, as_number, as_path
from jaxdist.errors import ArgumentError, ContextError

WAIT_SECONDS = 60.0
HOLD_SECONDS = 600.0
_NOTHING_COUNTED: dict[str, Any] = {"below": 0, "counted": []}


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

    def __init__(
        self,
        task: str = "ps:0",
        *,
        max_staleness: int | None = None,
        snapshot_directory: str | Path | None = None,
        snapshot_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        caller = "VariableServer"
        self.task = checks.check_name(caller, "task", task)
        # One lock: changes of one variable cannot run at the same time anyway, and a request of
        # several variables is atomic.
        self._condition = threading.Condition()
        self._state = State()
        self._broken: str | None = None
        self._keeper: SnapshotKeeper | None = None
        self._admission: Admission | None = None
        if max_staleness is not None:
            max_staleness = as_integer(caller, "max_staleness", max_staleness, least=0)
        self._clock = clock
        if snapshot_directory is not None:
            folder = Path(as_path(caller, "snapshot_directory", snapshot_directory, "snapshots"))
            seconds = as_number(caller, "snapshot_seconds", snapshot_seconds, least=0.0)
            self._keeper = SnapshotKeeper(folder, self.task, seconds, self._capture)
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

    def configure(self, max_staleness: int | None) -> None:
        """Set the bound, where it is another one; no closure is registered any more then.

        Raises:
            ArgumentError: It is below 0.
        """
        if max_staleness is not None:
            max_staleness = as_integer("configure", "max_staleness", max_staleness, least=0)
        with self._condition:
            if max_staleness != self._state.max_staleness:
                self._set_bound(max_staleness)
                self._state.mutations += 1
                self._condition.notify_all()

    def _set_bound(self, bound: int | None) -> None:
        self._state.max_staleness = bound
        self._admission = (
            None
            if bound is None
            else Admission(self._condition, bound, self._clock, self._check_values)
        )

    def hello(self, client: str = "") -> dict[str, Any]:
        """Return who this server is, and from which versions it serves.

        Args:
            client: Whose counted closures are told, for each restart from a snapshot; and whose
                own variables are not among those that are `restored` from one.
        """
        with self._condition:
            self._check_values()
            state = self._state
            return {
                "task": self.task,
                "incarnation": state.incarnation,
                "max_staleness": state.max_staleness,
                "applied": state.applied,
                "variables": len(state.variables),
                "snapshot": None if self._keeper is None else self._keeper.start_from,
                "versions": {name: v.start_version for name, v in state.variables.items()},
                "restored": [
                    name
                    for name, v in state.variables.items()
                    if v.snapshot is not None and (not client or v.creator != client)
                ],
                "has_snapshots": self._keeper is not None,
                "restores": [
                    {"incarnation": r.incarnation, **r.counted.get(client, _NOTHING_COUNTED)}
                    for r in state.restores
                ],
            }

    def create(
        self, creations: Sequence[Creation], client: str = ""
    ) -> dict[str, tuple[bool, int]]:
        """Create variables; those that exist with the same shape and dtype stay as they are.

        Args:
            creations: Names, and values or initialisers.
            client: Who creates them.

        Returns:
            For each name whether it is new, and its version.

        Raises:
            ShapeError: A variable exists with another shape or dtype. Then none is created.
            ArgumentError: A name is not valid, or comes twice, or an initialiser cannot be run.
            ArgumentTypeError: A value is no array.
        """
        # Outside of the lock: compiling an initialiser takes long.
        values = make_values("create", creations)
        with self._condition:
            self._check_values()
            return add_variables("create", self._state, values, client)

    def register_update(
        self, registration: UpdateRegistration, client: str = ""
    ) -> dict[str, tuple[bool, int]]:
        """Add an update program, and the slots of the variables that it changes.

        Args:
            registration: The program, its variables, and the first values of their slots.
            client: Who registers it.

        Returns:
            For each slot whether it is new, and its version.

        Raises:
            ArgumentTypeError: The bytes are no exported function.
            ArgumentError: The function has another form, or the key has another program.
            ShapeError: A variable or slot is not what the program takes. Nothing is added.
            NotFoundError: A variable does not exist.
        """
        caller = "register_update"
        key = checks.check_name(caller, "key", registration.key)
        with self._condition:
            self._check_values()
            found = self._state.programs.get(key)
        program = UpdateProgram.prepare(caller, registration, found)
        content = registration.init
        what = f"the initialiser of program {key!r}"
        init = None if content is None else Initialiser(caller, what, content)
        with self._condition:
            self._check_values()
            return add_update(caller, self._state, program, registration, init, client)

    def read(
        self,
        names: Sequence[str],
        *,
        client: str = "",
        closure: int | None = None,
        register: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
        incarnation: str | None = None,
        seconds: float = WAIT_SECONDS,
        hold_seconds: float = HOLD_SECONDS,
    ) -> Values:
        """Return values and versions, all of one moment.

        Args:
            names: The variables to read.
            client: The client that scheduled the closure.
            closure: The number of the closure that reads; None registers nothing.
            register: More variables that the closure will change, or read rows of. A closure
                reads once on each server, and names all variables that it changes there.
            known: The versions that the caller has; values of the same version are not returned.
            incarnation: The incarnation of the known versions. Others are ignored.
            seconds: How long to wait for other closures.
            hold_seconds: How long the closure stays registered, if it neither changes the
                variables nor is released.

        Raises:
            NotFoundError: A variable does not exist.
            DeadlineExceededError: Other closures held the variables all the time.
        """
        with self._condition:
            self._check_values()
            get_versions = self._make_get_versions("read", [*names, *register])
            get_versions()
            is_registered = self._admission is not None and closure is not None
            if self._admission is not None and closure is not None:
                own = (client, closure)
                self._admission.admit("read", own, get_versions, seconds, hold_seconds)
            return Values(*self._collect(names, known, incarnation), is_registered)

    def read_rows(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Return rows of a variable in the order of `ids`, and its version.

        Raises:
            NotFoundError: The variable does not exist.
            ArgumentError: An id is not a row.
            ArgumentTypeError: The ids are no list of integers.
            ShapeError: The variable has no dims.
        """
        with self._condition:
            self._check_values()
            found = checks.find_variable("read_rows", self._state.variables, name)
            ids = checks.check_ids("read_rows", found, ids)
            return found.peek()[ids], found.version

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
        read_closure: int | None = None,
        register: Sequence[str] = (),
        seconds: float = WAIT_SECONDS,
        hold_seconds: float = HOLD_SECONDS,
    ) -> Changed:
        """Apply the changes of a closure once, and return the values asked for.

        A request that comes again, or of a closure that nobody waits for any more, changes
        nothing. After the request the closure is no longer registered.

        Args:
            changes: The changes, in their order. All changes of one variable in one request are
                one version.
            client: The client that scheduled the closure.
            closure: The number of the closure, which sends one request to each server; None is
                always applied.
            done_below: All closures of the client with lower numbers are finished.
            incarnation: The incarnation of the versions in `changes` and `known`.
            read: Variables to read afterwards.
            known: As in `read`.
            read_closure: The closure that will use what is read. It is registered if it need not
                wait.
            register: As in `read`, for `read_closure`.
            seconds: How long to wait for other closures.
            hold_seconds: As in `read`, for `read_closure`.

        Raises:
            NotFoundError: A variable does not exist.
            ArgumentError: An operation, a number of operands, an id or a version is not valid.
            ArgumentTypeError: An operand is no array.
            ShapeError: An operand has another shape or dtype than the variable.
            DeadlineExceededError: Older closures did not change the variables in time.
        """
        if closure is not None and done_below > closure:
            raise ArgumentError(
                f"change was given closure={closure} and done_below={done_below}.\n\n"
                "Closures below done_below are finished, and this one is not.\n\n"
                f"Pass done_below={closure} or less."
            )
        own = None if closure is None else (client, closure)
        with self._condition:
            self._check_values()
            get_versions = self._make_get_versions("change", [*read, *register])
            get_versions()
            request = ChangeRequest(self._state, changes, own, incarnation)
            try:
                status = request.run(self._admission, client, seconds)
            except LostValuesError as error:
                self._broken = str(error)
                self._condition.notify_all()
                raise make_broken_error(self._broken) from error
            self._state.counted.forget_below(client, done_below)
            is_registered = False
            if self._admission is not None:
                if own is not None:
                    self._admission.release(own)
                if read_closure is not None:
                    following = (client, read_closure)
                    is_registered = self._admission.try_admit(following, get_versions, hold_seconds)
            found = self._collect(read, known, incarnation)
            return Changed(*found, is_registered, status, tuple(request.staleness))

    def release(self, client: str, closure: int) -> bool:
        """Remove the reads of a closure that will not change anything; return whether it had any.

        Without `max_staleness` no closure has any.
        """
        with self._condition:
            self._check_values()
            return self._admission is not None and self._admission.release((client, closure))

    def delete(self, names: Sequence[str]) -> list[str]:
        """Delete variables and their slots; return the names of those that existed."""
        with self._condition:
            self._check_values()
            state = self._state
            owned = {n: slots for n in names for (v, _), slots in state.slots.items() if v == n}
            gone = [*names, *(slot for slots in owned.values() for slot in slots)]
            state.mutations += 1
            state.slots = {k: s for k, s in state.slots.items() if k[0] not in names}
            self._condition.notify_all()
            return [n for n in dict.fromkeys(gone) if state.variables.pop(n, None) is not None]

    def statistics(self) -> dict[str, Any]:
        """Return counts, and the histogram of staleness, as JSON can hold them."""
        with self._condition:
            self._check_values()
            snapshots = None if self._keeper is None else self._keeper.describe()
            return self._state.describe() | {"snapshots": snapshots}

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

    def _capture(self, unless: int | None) -> Captured | None:
        with self._condition:
            # Otherwise the good snapshots would be replaced.
            self._check_values()
            same = self._state.mutations == unless
            return None if same else capture(self._state, self.task)

    def _make_get_versions(self, caller: str, names: Sequence[str]) -> GetVersions:
        variables = self._state.variables
        return lambda: {n: checks.find_variable(caller, variables, n).version for n in names}

    def _collect(
        self, names: Sequence[str], known: Mapping[str, int] | None, incarnation: str | None
    ) -> tuple[str, dict[str, int], dict[str, np.ndarray]]:
        # A variable may be deleted while a request waits.
        variables = self._state.variables
        found = {n: checks.find_variable("read", variables, n) for n in names}
        kept = known if known and incarnation == self._state.incarnation else {}
        versions = {name: v.version for name, v in found.items()}
        values = {n: v.read() for n, v in found.items() if kept.get(n) != v.version}
        return self._state.incarnation, versions, values

    def _check_values(self) -> None:
        if self._broken is not None:
            raise make_broken_error(self._broken)
