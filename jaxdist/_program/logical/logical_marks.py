"""Which values of a trace are marked with a layout over the logical devices."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.logical.logical_layout import LOGICAL_LAYOUT

# For each dim the number of parts; None is a value that is not marked.
Parts: TypeAlias = tuple[int, ...] | None


def marks_of_results(program: Any, inputs: Sequence[Parts] = ()) -> list[Parts]:
    """The marks of the results of an open or closed program; of other values nothing is known.

    A mark is on what it was put on, also where that comes out of a function or of a loop.
    """
    jaxpr = getattr(program, "jaxpr", program)
    env: dict[Any, Parts] = dict(zip(jaxpr.invars, inputs, strict=False))

    def read(atom: Any) -> Parts:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _marks(eqn, [read(v) for v in eqn.invars]), strict=False))
    return [read(v) for v in jaxpr.outvars]


def _marks(eqn: Any, inputs: list[Parts]) -> list[Parts]:
    name = eqn.primitive.name
    if eqn.primitive is LOGICAL_LAYOUT:
        return [tuple(max(n, 1) for n in eqn.params["parts"])]
    if name in known.CALLS and known.CALLS[name] in eqn.params and name != "shard_map":
        return marks_of_results(eqn.params[known.CALLS[name]], inputs)
    if name == "scan":
        _, carry = _compat.scan_counts(eqn.params)
        inside = marks_of_results(eqn.params["jaxpr"])
        # After no turn at all the state is what came in.
        state = [m if eqn.params["length"] else None for m in inside[:carry]]
        return [*state, *(None if m is None else (1, *m) for m in inside[carry:])]
    return []
