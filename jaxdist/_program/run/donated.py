"""Checks of `donate_argnums`, and the program inputs that it covers."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._program.arguments.arguments import Flat, GraphNode, Static
from jaxdist._program.compile.program import Program
from jaxdist._program.nnx.graph import GraphShape
from jaxdist.errors import ArgumentError, DonationError


def check_positions(donated: Sequence[int], args: Sequence[Any]) -> None:
    """Raise if `donate_argnums` contains a position that the call does not have.

    Raises:
        ArgumentError: Some position is out of range.
    """
    out_of_range = [n for n in donated if not 0 <= n < len(args)]
    if out_of_range:
        raise ArgumentError(
            f"RunOptions(donate_argnums={tuple(donated)}) has {out_of_range}, and the step was "
            f"called with {len(args)} positional argument(s).\n\n"
            "donate_argnums are positions of arguments, from 0. Keyword arguments cannot be "
            f"donated.\n\n{_suggest_positions(donated, len(args))}"
        )


def find_donated_leaves(donated: Sequence[int], flat: Flat, graph: GraphShape | None) -> list[int]:
    """Return the numbers of the program's inputs that these arguments contain.

    Variables of NNX objects come first.
    """
    if not donated:
        return []
    offset = len(graph.paths) if graph else 0
    leaves: list[int] = []
    for path, slot in zip(flat.paths(), flat.slots, strict=True):
        # The first key of a path is 0 for `args` and 1 for `kwargs`, which cannot be donated.
        if path[0].idx != 0 or path[1].idx not in donated:
            continue
        if isinstance(slot, GraphNode) and graph is not None:
            leaves += [i for i, p in enumerate(graph.paths) if p[0] == slot.index]
        elif not isinstance(slot, Static):
            leaves.append(offset + slot)
    return leaves


def _suggest_positions(donated: Sequence[int], count: int) -> str:
    kept = tuple(n for n in donated if 0 <= n < count)
    return f"Pass RunOptions(donate_argnums={kept})." if kept else "Leave donate_argnums out."


def check_not_repeated(donated: Sequence[int], leaves: Sequence[Any], program: Program) -> None:
    """Raise if the call contains one buffer twice and donates it.

    Raises:
        DonationError: The error names both places.
    """
    if not program.donated:
        return
    names = program.input_names
    seen: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        # NumPy arrays and numbers are copied to the devices, so they are never donated.
        if not isinstance(leaf, jax.Array):
            continue
        first = seen.setdefault(id(leaf), i)
        if first != i and (i in program.donated or first in program.donated):
            raise DonationError(
                f"strategy.run would donate one array twice: {names[first]} and {names[i]} are "
                "the same buffer.\n\n"
                "A donated buffer is given to the results, so nothing else may use it.\n\n"
                "Copy one of them first (jnp.copy), or leave it out of donate_argnums "
                f"{donated}."
            )
