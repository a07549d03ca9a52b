"""Programs that are not drawn yet, because uneven batches have known limits.

Each line is a limit with the programs that it concerns. A line goes when the limit goes; the other
programs keep their numbers then.
"""

from collections.abc import Callable
from typing import Any


def _has(program: Any, what: str, names: set[str]) -> bool:
    return any(f"{what} {name}" in program.features for name in names)


EXCLUDED: dict[str, Callable[[Any], bool]] = {}

# Steps that are not run op by op: the error is JAX's own, with a note that says how to go on.
NOT_OP_BY_OP: dict[str, Callable[[Any], bool]] = {
    "a map over no rows": lambda p: p.has_empty_replica and _has(p, "row", {"map"}),
}


def is_not_run_op_by_op(program: Any) -> bool:
    """Whether a step is not run op by op."""
    return any(applies(program) for applies in NOT_OP_BY_OP.values())
