"""The update of a shard: a program of a whole array, run on some of its rows.

# Note [Rows of an update]
An update is traced with the shape of the whole parameter. `RowInterpreter` runs the trace on the
rows of one shard, with values of three kinds: `Rows` (some rows of an array along dim 0), `Fill`
(an array of equal rows, which has as many as needed), and plain values, which are the same for all
shards. It accepts operations that compute a row from the same row, and raises for every other one.
So the result is that of the whole array, whatever the transformation does by shape or by path.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import ClosedJaxpr

from jaxdist import _compat
from jaxdist._called import name_call
from jaxdist._program import Interpreter
from jaxdist._values import ELEMENTWISE
from jaxdist.errors import UnsupportedError

_REDUCTIONS = frozenset(f"reduce_{n}" for n in ("sum", "max", "min", "prod", "and", "or"))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of an array."""

    array: Any


@dataclasses.dataclass(frozen=True)
class Fill:
    """An array that is one scalar everywhere."""

    scalar: Any
    shape: tuple[int, ...]


class RowInterpreter(Interpreter[Any]):
    """Runs a program of a whole array on some of its rows. See Note [Rows of an update].

    Args:
        name: The parameter, for error messages.
        whole: The rows of the whole array.
        local: The rows of the shard.
    """

    def __init__(self, name: str, whole: int, local: int) -> None:
        self._caller, self._name, self._whole, self._local = name_call(), name, whole, local

    def get_local_aval(self, aval: Any) -> Any:
        """Return the shape of a slot in a shard."""
        shape = self._get_local_shape(aval.shape) if self._is_cut(aval) else aval.shape
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    def compute(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results for a shard.

        Raises:
            UnsupportedError: An operation needs other rows.
        """
        variables = program.jaxpr.invars
        given = [
            Rows(x) if self._is_cut(v.aval) else x
            for x, v in zip(arguments, variables, strict=True)
        ]
        results = self.run(program, given)
        return [
            self._localize(result, v.aval)
            for result, v in zip(results, program.jaxpr.outvars, strict=True)
        ]

    def _localize(self, value: Any, aval: Any) -> Any:
        """Return a result, or an operand of a branch, as an array of this shard."""
        if not self._is_cut(aval):
            return self._get_whole(value)
        if isinstance(value, (Rows, Fill)):
            return self._get_rows(value)
        self._refuse(None, "a slot has the rows of the variable, and is computed from all of them")

    def _is_cut(self, aval: Any) -> bool:
        return len(aval.shape) > 0 and aval.shape[0] == self._whole

    def _get_local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self._local, *shape[1:])

    def _get_rows(self, value: Rows | Fill) -> Any:
        if isinstance(value, Rows):
            return value.array
        return jax.numpy.full(self._get_local_shape(value.shape), value.scalar)

    def _get_whole(self, value: Any) -> Any:
        if isinstance(value, Fill):
            return jax.numpy.full(value.shape, value.scalar)
        return value

    def literal(self, literal: Any) -> Any:
        return jax.numpy.asarray(literal.val, literal.aval.dtype)

    def constant(self, variable: Any, value: Any) -> Any:
        return value

    def equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        shape = tuple(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else ()
        has_rows = any(isinstance(v, Rows) for v in inputs)
        if name == "broadcast_in_dim" and len(inputs) == 1:
            [operand] = inputs
            scalar = operand.scalar if isinstance(operand, Fill) else operand
            if not has_rows and getattr(scalar, "shape", None) == () and shape:
                return [Fill(scalar, shape)]
        if name in ELEMENTWISE and len(eqn.outvars) == 1 and not eqn.effects:
            found = self._run_elementwise(eqn, inputs, shape)
            if found is not None:
                return [found]
        if has_rows and name in _RULES:
            params = _RULES[name](eqn, self._whole, self._local)
            if params is not None:
                return [Rows(_compat.bind_like(eqn, [v.array for v in inputs], params)[0])]
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if any(isinstance(v, Rows) for v in inputs):
            self._refuse(eqn, f"{eqn.primitive.name} needs more than one row at a time")
        return list(_compat.bind_like(eqn, [self._get_whole(v) for v in inputs], eqn.params))

    def _run_elementwise(self, eqn: Any, inputs: list[Any], shape: tuple[int, ...]) -> Any:
        if any(isinstance(v, Rows) for v in inputs):
            local = []
            for value in inputs:
                if isinstance(value, (Rows, Fill)):
                    local.append(self._get_rows(value))
                elif getattr(value, "shape", ()) == ():
                    local.append(value)
                else:
                    self._refuse(
                        eqn,
                        "the rows are combined with an array that is not cut into the same rows",
                    )
            return Rows(_compat.bind_like(eqn, local, eqn.params)[0])
        if shape and any(isinstance(v, Fill) for v in inputs):
            scalars = [v.scalar if isinstance(v, Fill) else v for v in inputs]
            if all(getattr(x, "shape", ()) == () for x in scalars):
                return Fill(_compat.bind_like(eqn, scalars, eqn.params)[0], shape)
        return None

    def cond(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        index, *operands = inputs
        if isinstance(index, (Rows, Fill)) or not any(isinstance(v, Rows) for v in operands):
            return self.operation(eqn, inputs)
        avals = [v.aval for v in eqn.invars[1:]]
        # All branches return the same kinds of values, so the shapes decide.
        given = [
            self._get_rows(v) if isinstance(v, (Rows, Fill)) and self._is_cut(a) else v
            for v, a in zip(operands, avals, strict=True)
        ]
        is_rows = [isinstance(v, (Rows, Fill)) for v in operands]

        def make_branch(program: Any) -> Any:
            def branch(*arrays: Any) -> list[Any]:
                pairs = zip(arrays, is_rows, strict=True)
                results = self.run(program, [Rows(x) if cut else x for x, cut in pairs])
                made = zip(results, eqn.outvars, strict=True)
                return [self._localize(result, v.aval) for result, v in made]

            return branch

        branches = [make_branch(p) for p in eqn.params["branches"]]
        found = jax.lax.switch(index, branches, *given)
        pairs = zip(found, eqn.outvars, strict=True)
        return [Rows(x) if self._is_cut(v.aval) else x for x, v in pairs]

    def _refuse(self, eqn: Any, why: str) -> NoReturn:
        where = "" if eqn is None else f", at {_compat.find_caller_of_library(eqn)}"
        raise UnsupportedError(
            f"{self._caller}: the update of {self._name!r}, which is in shards, needs other "
            f"shards: {why}{where}.\n\n"
            "Each shard is updated by its own server, so each row of the next value may depend on "
            "the same row only.\n\n"
            "Keep this variable whole (no variable_partitioner), or use an optimizer that works "
            "element by element, such as optax.adam, for it: optax.partition chooses by path."
        )


def _reduce(eqn: Any, whole: int, local: int) -> dict[str, Any] | None:
    return None if 0 in eqn.params["axes"] else eqn.params


def _broadcast(eqn: Any, whole: int, local: int) -> dict[str, Any] | None:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(eqn.invars) != 1 or not dims or dims[0] != 0 or shape[0] != whole:
        return None
    return {**eqn.params, "shape": (local, *shape[1:])}


def _reshape(eqn: Any, whole: int, local: int) -> dict[str, Any] | None:
    sizes = eqn.params["new_sizes"]
    if len(eqn.invars) != 1 or not sizes or sizes[0] != whole or eqn.params.get("dimensions"):
        return None
    return {**eqn.params, "new_sizes": (local, *sizes[1:])}


def _squeeze(eqn: Any, whole: int, local: int) -> dict[str, Any] | None:
    return None if 0 in eqn.params["dimensions"] else eqn.params


def _transpose(eqn: Any, whole: int, local: int) -> dict[str, Any] | None:
    return eqn.params if eqn.params["permutation"][0] == 0 else None


# The parameters of an operation on the rows of a shard; None if it needs more than the same row.
_RULES = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
