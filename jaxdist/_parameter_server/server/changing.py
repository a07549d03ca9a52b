"""Requests that create variables, or change them: the turn of a closure, and its application.

All checks come first, then all values are computed, then all are committed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxdist._called import refuse
from jaxdist._parameter_server import protocol
from jaxdist._parameter_server.server.programs import Initialiser, UpdateProgram
from jaxdist._parameter_server.server.staleness import Admission
from jaxdist._parameter_server.server.state import ALREADY, COUNTED, State
from jaxdist._parameter_server.server.stored import (
    DENSE,
    PROGRAM,
    ROWS,
    StagedVariable,
    StoredVariable,
    check_array,
    check_change,
    check_name,
    find_variable,
    put_on_cpu,
    stage_dense,
    stage_rows,
)
from jaxdist.errors import ShapeError

TOO_STALE = "too stale"


class LostValuesError(Exception):
    """A program failed after it had taken the memory of values that are not replaced yet."""


class StagedRequest:
    """The next values of the variables that one request changes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._staged: dict[str, StagedVariable] = {}

    def stage(self, changes: Sequence[protocol.Change]) -> None:
        """Compute the next values; `Changing` has checked the changes.

        Raises:
            LostValuesError: A program failed after it had taken the memory of values.
        """
        try:
            for change in changes:
                if change.op in DENSE:
                    stage_dense(self._get(change.name), change.op, change.operands[0])
                elif change.op in ROWS:
                    stage_rows(self._get(change.name), change.op, *change.operands)
                else:
                    self._stage_program(change)
        except Exception as error:
            held = [staged.stored for staged in self._staged.values()]
            lost = [v.name for v in held if isinstance(v.value, jax.Array) and v.value.is_deleted()]
            if lost:
                why = f"{type(error).__name__}: {error}; the values of {', '.join(lost)} are lost"
                raise LostValuesError(why) from error
            raise

    def _stage_program(self, change: protocol.Change) -> None:
        program = self._state.programs[change.op.removeprefix(PROGRAM)]
        names = [change.name, *self._state.slots[change.name, program.key]]
        staged = [self._get(name) for name in names]
        state = [put_on_cpu(each.get_dense()) for each in staged]
        results = program.run([*state, *change.operands])
        for each, value in zip(staged, results, strict=True):
            each.set_dense(value)

    def _get(self, name: str) -> StagedVariable:
        return self._staged.setdefault(name, StagedVariable(self._state.variables[name]))

    def commit(self) -> list[StoredVariable]:
        """Make the next values those of the variables, which are returned; this cannot fail."""
        for staged in self._staged.values():
            staged.commit()
            staged.stored.version += 1
            staged.stored.applied += 1
        return [staged.stored for staged in self._staged.values()]


class Changing:
    """One request to change variables, on a server whose lock is held.

    Args:
        state: The state of the server.
        request: The request.

    Attributes:
        staleness: That of each change, when they are applied.
    """

    def __init__(self, state: State, request: protocol.ChangeVariables) -> None:
        self._state, self._request, self._changes = state, request, request.changes
        number = request.closure
        self._closure = None if number is None else (request.client, number)
        self._is_own = request.incarnation in (None, state.incarnation)
        self.staleness: list[int | None] = []

    def run(self, admission: Admission | None) -> str:
        """Apply the request if it is not counted yet, and return its status.

        Raises:
            ArgumentError, ShapeError, ...: It is not valid. Nothing is changed.
            DeadlineExceededError: Older closures did not change the variables in time.
            LostValuesError: A program failed after it had taken the memory of values.
        """
        self._check()
        status = self._find_status()
        if status is None and admission is None:
            self._apply(self._measure({}))
        elif status is None and admission is not None:
            status = self._run_in_turn(admission)
        if status == ALREADY:
            self._state.already_counted += 1
        return status or COUNTED

    def _check(self) -> None:
        programs = self._state.programs
        for change in self._changes:
            variable = find_variable(self._state.variables, change.name)
            check_change(variable, change, programs)
            if change.op not in DENSE and change.op not in ROWS:
                program = programs[change.op.removeprefix(PROGRAM)]
                self._check_slots(program, change.name)
                program.check_operands(change.name, change.operands)
        for change in self._changes:
            found = self._state.variables[change.name].version
            if change.version is not None and self._is_own and change.version > found:
                raise refuse(
                    f"version={change.version} of {change.name!r}, whose version is {found}.",
                    "The version is that of the read that the change was computed from.",
                    "Pass the version that read returned, and its incarnation.",
                )

    def _check_slots(self, program: UpdateProgram, name: str) -> None:
        if (name, program.key) not in self._state.slots:
            raise refuse(
                f"op={PROGRAM + program.key!r} for {name!r}, which has no slots for this program.",
                "A program is registered for the variables that it changes, with the "
                f"{program.num_slots} first values of the slots of each.",
                f"Call register_update({program.key!r}, ...) with {name!r} among its variables.",
            )

    def _find_status(self) -> str | None:
        found = self._closure
        return None if found is None else self._state.counted.find_status(*found)

    def _get_versions(self) -> dict[str, int]:
        return self._state.get_versions(change.name for change in self._changes)

    def _run_in_turn(self, admission: Admission) -> str | None:
        """Wait for older closures, and apply the request. See Note [Bounded staleness]."""
        seconds = self._request.seconds
        own = admission.make_id(self._request.client, self._request.closure)
        reads = admission.flight.get_reads(own)
        if reads is None:
            # A write of the coordinator, or a closure whose deadline has passed. It takes its place
            # among the reads, since otherwise later closures could overtake it forever.
            admission.admit(own, self._get_versions, seconds, seconds)
        else:
            self._check_registered(reads)
        try:
            admission.wait_for_older(own, self._get_versions, seconds)
            # While it waited, the same request may have been applied.
            status = self._find_status()
            if status is None:
                staleness = self._measure(reads or {})
                if any(n is not None and n > admission.flight.max_staleness for n in staleness):
                    return TOO_STALE
                self._apply(staleness)
            return status
        finally:
            if reads is None:
                admission.release(own)

    def _check_registered(self, reads: Mapping[str, int]) -> None:
        missing = [c.name for c in self._changes if c.name not in reads]
        if missing:
            raise refuse(
                f"{missing[0]!r}, which closure {self._request.closure} did not register; it "
                f"registered {', '.join(map(repr, reads))}.",
                "With max_staleness, a closure that registers its read names all variables that "
                "it will change: otherwise two closures could wait for each other.",
                f"Read with register=[{missing[0]!r}].",
            )

    def _measure(self, reads: Mapping[str, int]) -> list[int | None]:
        """Return the staleness of each change."""
        found: list[int | None] = []
        for change in self._changes:
            variable = self._state.variables[change.name]
            base = reads.get(change.name) if change.version is None else change.version
            if base is not None and change.version is not None and not self._is_own:
                # Changes after the snapshot are lost, and do not count.
                base = min(base, variable.start_version)
            found.append(None if base is None else variable.version - base)
        return found

    def _apply(self, staleness: list[int | None]) -> None:
        state = self._state
        request = StagedRequest(state)
        request.stage(self._changes)
        request.commit()
        state.applied += 1
        state.mutations += 1
        if self._closure is not None:
            state.counted.count(*self._closure)
        self.staleness = staleness
        client = "" if self._closure is None else self._closure[0]
        for change, number in zip(self._changes, staleness, strict=True):
            if number is not None:
                state.staleness[number] += 1
                state.staleness_of.setdefault(client, Counter())[number] += 1
                state.variables[change.name].staleness[number] += 1


def make_values(creations: Sequence[protocol.Creation]) -> dict[str, np.ndarray]:
    """Return the first values of variables, by name."""
    values: dict[str, np.ndarray] = {}
    for creation in creations:
        name = check_name("name", creation.name)
        if name in values:
            raise refuse(
                f"{name!r} twice.",
                "Each variable has its own name.",
                "Give the second one another name.",
            )
        values[name] = _make_value(creation)
    return values


def _make_value(creation: protocol.Creation) -> np.ndarray:
    if creation.program is None:
        # The array may be the caller's own, which it may change later.
        return np.array(check_array(f"the value of {creation.name!r}", creation.value))
    what = f"the initialiser of {creation.name!r}"
    results = Initialiser(what, creation.program.tobytes()).run()
    if len(results) != 1:
        raise refuse(
            f"{what}, which returns {len(results)} arrays.",
            "An initialiser returns the value of one variable.",
            "Return one array.",
        )
    return results[0]


def add_variables(state: State, values: Mapping[str, np.ndarray], client: str) -> protocol.Created:
    """Add the variables that do not exist; return for each whether it is new, and its version.

    A variable that the client itself has made counts as new: it repeats the request if the reply
    is lost.

    Raises:
        ShapeError: A variable exists with another shape or dtype. Then none is added.
    """
    for name, value in values.items():
        found = state.variables.get(name)
        if found is not None and (found.shape != value.shape or found.dtype != value.dtype):
            raise refuse(
                f"{name!r} as {value.dtype}{list(value.shape)}, and it exists as "
                f"{found.describe()}, {found.describe_origin()}.",
                "A variable keeps its shape and dtype, and a second creator gets the one that "
                "exists.",
                "Use another name, delete the variable, or start the server with an empty "
                "snapshot directory.",
                kind=ShapeError,
            )
    new = {name for name in values if name not in state.variables}
    state.mutations += 1
    for name in values:
        if name in new:
            state.variables[name] = StoredVariable(name, values[name], creator=client)
    found = {name: state.variables[name] for name in values}
    return protocol.Created(
        {
            name: (name in new or (client != "" and one.creator == client), one.version)
            for name, one in found.items()
        }
    )


def add_update(
    state: State,
    program: UpdateProgram,
    request: protocol.RegisterUpdate,
    init: Initialiser | None,
) -> protocol.Created:
    """Add a program, and the slots of its variables; slots that exist stay as they are."""
    prefix = check_name("prefix", request.prefix)
    flat: dict[str, np.ndarray] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, given in request.variables.items():
        variable = find_variable(state.variables, name)
        program.check_variable(variable)
        values = program.make_slots(variable, given, init)
        names[name] = tuple(f"{name}/{prefix}_{i}" for i in range(len(values)))
        flat.update(zip(names[name], values, strict=True))
    # Another thread may have registered the key while this one compiled.
    state.programs.get(program.key, program).check_same(program)
    created = add_variables(state, flat, request.client)
    state.programs.setdefault(program.key, program)
    state.slots.update({(name, program.key): own for name, own in names.items()})
    return created
