"""The table of `reduce` and `gather`: a function for each context and kind of value."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxdist import _collectives
from jaxdist._collectives import Function, Request, ValueKind
from jaxdist._strategies.across import by_ops, in_merge


class Context(enum.Enum):
    """The context in which a strategy combines values. See Note [Kinds and contexts]."""

    OUTSIDE = "outside of a step"
    BY_OPS = "outside of a step, by the user's CrossDeviceOps"
    IN_MERGE = "in a merge function, while a step is traced"


@dataclasses.dataclass(frozen=True)
class Together:
    """A function that combines several leaves, given by name, in one call."""

    function: Callable[[Request, dict[str, Any]], list[Any]]


Table: TypeAlias = Mapping[Context, Mapping[ValueKind, Function | Together]]

_OF_REPLICAS = (ValueKind.HELD, ValueKind.LIST)

REDUCE: Table = {
    Context.OUTSIDE: _collectives.REDUCE,
    Context.BY_OPS: {
        **_collectives.REDUCE,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), Together(by_ops.reduce)),
    },
    # A concrete array is equal on all replicas. A traced value that the function closes over may
    # differ between them, so it is reduced like a handle.
    Context.IN_MERGE: {
        **_collectives.REDUCE,
        **dict.fromkeys(
            (*_OF_REPLICAS, ValueKind.TRACED_VALUES, ValueKind.TRACED),
            Together(in_merge.reduce_own_values),
        ),
        ValueKind.SLICES: in_merge.reduce_slices,
    },
}
GATHER: Table = {
    Context.OUTSIDE: _collectives.GATHER,
    Context.BY_OPS: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), by_ops.gather),
    },
    Context.IN_MERGE: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.TRACED_VALUES), in_merge.gather_own_value),
        **dict.fromkeys(
            (ValueKind.ROWS, ValueKind.TRACED, ValueKind.SHARDED, ValueKind.ONE), in_merge.keep
        ),
    },
}


def apply(
    found: Mapping[str, Function | Together], request: Request, named: dict[str, Any]
) -> list[Any]:
    """Apply to each leaf the function found for its name; return the results in order."""
    results = dict(named)
    for together in dict.fromkeys(f for f in found.values() if isinstance(f, Together)):
        own = {name: named[name] for name, f in found.items() if f == together}
        results.update(zip(own, together.function(request, own), strict=True))
    for name, function in found.items():
        if not isinstance(function, Together):
            results[name] = function(request, name, named[name])
    return list(results.values())
