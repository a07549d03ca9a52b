"""Creating variables, and the slots of update programs."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxdist._called import refuse
from jaxdist._parameter_server.protocol import Created, Creation, RegisterUpdate
from jaxdist._parameter_server.server.checks import check_array, check_name, find_variable
from jaxdist._parameter_server.server.programs import Initialiser, UpdateProgram
from jaxdist._parameter_server.server.state import State
from jaxdist._parameter_server.server.stored import StoredVariable
from jaxdist.errors import ShapeError


def make_values(creations: Sequence[Creation]) -> dict[str, np.ndarray]:
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


def _make_value(creation: Creation) -> np.ndarray:
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


def add_variables(state: State, values: Mapping[str, np.ndarray], client: str) -> Created:
    """Add the variables that do not exist; return for each whether it is new, and its version.

    One that the client itself has made counts as new: it asks again after a lost reply.

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
    return Created(
        {
            name: (name in new or (client != "" and one.creator == client), one.version)
            for name, one in found.items()
        }
    )


def add_update(
    state: State,
    program: UpdateProgram,
    request: RegisterUpdate,
    init: Initialiser | None,
) -> Created:
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
