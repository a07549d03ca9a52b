"""What a caller gives to a server, and what it gets."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of one variable.

    Args:
        op: One of `operations.DENSE` and `operations.ROWS`, or `program:<key>`.
        name: The variable.
        operands: The arrays of the operation: one of the variable's shape for a dense operation;
            ids and rows for one of rows; those of an update program.
        version: The version of the variable that the operands were computed from; None if they
            were computed from no read.
    """

    op: str
    name: str
    operands: Sequence[np.ndarray]
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Creation:
    """A variable to create.

    Args:
        name: The name.
        value: The value, or the bytes of a `jax.export` function without arguments that returns
            it.
    """

    name: str
    value: np.ndarray | bytes


@dataclasses.dataclass(frozen=True)
class UpdateRegistration:
    """An update program, and the variables that it changes.

    Args:
        key: The name of the program: a change of it has the operation `program:<key>`.
        program: The bytes of a `jax.export` function
            `f(value, *slots, *operands) -> (value, *slots)`.
        num_slots: How many slots it has.
        variables: The variables, and for each the first values of its slots; None where `init`
            makes them.
        init: The bytes of a `jax.export` function `init(value) -> slots`.
        prefix: The names of the slots of `w` are `w/slot_0` and so on, with this prefix.
    """

    key: str
    program: bytes
    num_slots: int
    variables: Mapping[str, Sequence[np.ndarray] | None]
    init: bytes | None = None
    prefix: str = "slot"


@dataclasses.dataclass(frozen=True)
class Values:
    """What a read returns.

    Args:
        incarnation: The server's id; versions of another incarnation count other changes.
        versions: The version of each variable.
        values: The values that the caller did not know yet. Nobody writes into them.
        is_registered: Whether the closure is registered with this read.
    """

    incarnation: str
    versions: Mapping[str, int]
    values: Mapping[str, np.ndarray]
    is_registered: bool = False


@dataclasses.dataclass(frozen=True)
class Changed(Values):
    """What a change returns.

    Args:
        status: `counted`, `already counted`, or `finished`; only `counted` was applied now.
        staleness: The staleness of each change; None for one that was computed from no read.
    """

    status: str = ""
    staleness: Sequence[int | None] = ()
