"""Applying a request: all checks first, then all values are computed, then all are committed."""

from collections.abc import Mapping, Sequence

import jax

from jaxdist._parameter_server.protocol import Change
from jaxdist._parameter_server.server.checks import PROGRAM, check_change, find_variable
from jaxdist._parameter_server.server.operations import DENSE, ROWS, stage_dense, stage_rows
from jaxdist._parameter_server.server.programs import UpdateProgram
from jaxdist._parameter_server.server.state import Slots
from jaxdist._parameter_server.server.stored import StagedVariable, StoredVariable, put_on_cpu
from jaxdist.errors import ArgumentError


class LostValuesError(Exception):
    """A program failed when it had taken the memory of values that are not replaced yet."""


def check_changes(
    caller: str,
    changes: Sequence[Change],
    variables: dict[str, StoredVariable],
    programs: Mapping[str, UpdateProgram],
    slots: Slots,
) -> None:
    """Check all changes of a request against the variables of the server."""
    for change in changes:
        variable = find_variable(caller, variables, change.name)
        check_change(caller, variable, change, programs)
        if change.op not in DENSE and change.op not in ROWS:
            program = programs[change.op.removeprefix(PROGRAM)]
            _check_slots(caller, program, change.name, slots)
            program.check_operands(caller, change.name, change.operands)


def _check_slots(caller: str, program: UpdateProgram, name: str, slots: Slots) -> None:
    if (name, program.key) not in slots:
        raise ArgumentError(
            f"{caller} was given op={PROGRAM + program.key!r} for {name!r}, which has no "
            f"slots for this program.\n\n"
            f"A program is registered for the variables that it changes, with the "
            f"{program.num_slots} first values of the slots of each.\n\n"
            f"Call register_update({program.key!r}, ...) with {name!r} among its "
            "variables."
        )


class Request:
    """The next values of the variables that one request changes."""

    def __init__(
        self,
        variables: dict[str, StoredVariable],
        programs: Mapping[str, UpdateProgram],
        slots: Slots,
    ) -> None:
        self._variables, self._programs, self._slots = variables, programs, slots
        self._staged: dict[str, StagedVariable] = {}

    def stage(self, changes: Sequence[Change]) -> None:
        """Compute the next values; `check_changes` has accepted the changes.

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
                why = f"{type(error).__name__}: {error}; the values of {', '.join(lost)} are gone"
                raise LostValuesError(why) from error
            raise

    def _stage_program(self, change: Change) -> None:
        program = self._programs[change.op.removeprefix(PROGRAM)]
        names = [change.name, *self._slots[change.name, program.key]]
        staged = [self._get(name) for name in names]
        state = [put_on_cpu(each.get_dense()) for each in staged]
        results = program.run([*state, *change.operands])
        for each, value in zip(staged, results, strict=True):
            each.set_dense(value)

    def _get(self, name: str) -> StagedVariable:
        return self._staged.setdefault(name, StagedVariable(self._variables[name]))

    def commit(self) -> list[StoredVariable]:
        """Make the next values those of the variables, which are returned; this cannot fail."""
        for staged in self._staged.values():
            staged.commit()
            staged.stored.version += 1
            staged.stored.applied += 1
        return [staged.stored for staged in self._staged.values()]
