"""A description of the work of a step that runs on one logical device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs.interpreter import get_called_program, rule_for
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist._program.logical.logical_device import ASSIGN, LOGICAL_LAYOUT, get_device
from jaxdist._program.logical.placing import find_obstacle, is_marked, make_schedule
from jaxdist.errors import ContextError


@dataclasses.dataclass(frozen=True)
class PlacedWork:
    """Work of a step that runs on one logical device of each replica; `repr` is one line.

    Args:
        device: The logical device.
        operations: The number of operations that run there together.
        results: The number of arrays that the other devices get from it.
        source: The line that placed the work.
    """

    device: int
    operations: int
    results: int
    source: str

    def __repr__(self) -> str:
        return (
            f"logical device {self.device}: {self.operations} operation(s), {self.results} "
            f"result(s) for the others, requested at {self.source}"
        )


def placed_work(program: Any, *, backward: bool = False) -> list[PlacedWork]:
    """Return the regions of a program and of the programs in it, and marks that place nothing.

    Raises:
        ContextError: A function that was placed on a logical device cannot run there alone.
    """
    jaxpr = open_jaxpr(program)
    found: list[PlacedWork] = []
    if any(is_marked(e) for e in jaxpr.eqns):
        plan = make_schedule(jaxpr, backward=backward)
        for region in plan.regions:
            for eqn in region.eqns:
                _check_can_be_alone(eqn)
            shared = len(region.is_local) - sum(region.is_local)
            source = _compat.find_source(region.asked_by)
            found.append(PlacedWork(region.device, _count_operations(region.eqns), shared, source))
        made = {v for r in plan.regions for e in r.eqns for v in e.outvars}
        # Report marks without operations too: the user expects an effect of them. An input of the
        # step has no operation that could be placed.
        for eqn in jaxpr.eqns:
            if eqn.primitive is ASSIGN and not eqn.params["backward"]:
                value = plan.alias[eqn.outvars[0]]
                if isinstance(value, Literal) or value not in made:
                    found.append(PlacedWork(eqn.params["device"], 0, 0, _compat.find_source(eqn)))
    for eqn in jaxpr.eqns:
        if get_device(eqn) is None and eqn.primitive.name != "shard_map":
            down = backward or _compat.is_transposed(eqn)
            for inner in subprograms(eqn):
                found += placed_work(inner, backward=down)
    return found


def _count_operations(eqns: Sequence[Any]) -> int:
    """Return the number of operations, counting those inside called functions."""
    return sum(
        _count_operations(open_jaxpr(get_called_program(e)).eqns) if rule_for(e) == "call" else 1
        for e in eqns
    )


def _check_can_be_alone(eqn: Any) -> None:
    if get_device(eqn) is None:
        return
    for program in subprograms(eqn):
        for inner in open_jaxpr(program).eqns:
            found = inner if is_marked(inner) else find_obstacle(inner)
            if found is not None:
                raise ContextError(
                    f"on_logical_device({get_device(eqn)}): the function has "
                    f"{_describe(found)} in it, at {_compat.find_source(found)}.\n\n"
                    "One logical device of each replica runs the function while the others "
                    "continue, so nothing in it can need the others, or be for them.\n\n"
                    "Take it out: call on_logical_device for what is before it and for what is "
                    "after it."
                )


def _describe(eqn: Any) -> str:
    if eqn.primitive is LOGICAL_LAYOUT:
        return "a split over, or a replication to, the logical devices"
    if is_marked(eqn):
        return "work that was put on a logical device"
    return f"a {eqn.primitive.name}"
