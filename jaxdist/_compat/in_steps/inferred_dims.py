"""The dim that -1 stands for in a reshape of an array without elements.

Without rows, `x.reshape(x.shape[0], -1)` has no answer in JAX: 0 elements divided by 0 rows.
jaxdist uses the answer of the same line for an array with rows. Waits for JAX to trace a step for
an unknown number of rows.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any

from jax._src.numpy import array_methods as _array_methods

from jaxdist._compat.tracing import set_in_block

_COMPUTE = "_compute_newshape"
_UNKNOWN = -1
Place = tuple[CodeType, int]


@dataclasses.dataclass(frozen=True)
class _Reshape:
    """A reshape of an array with elements: its shapes with -1, and the dim that -1 was."""

    shape: tuple[int, ...]
    wanted: tuple[int, ...]
    dim: int

    def fits(self, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Whether this reshape has these shapes, up to the number of rows."""
        return _are_alike(self.shape, shape) and _are_alike(self.wanted, wanted)


def _are_alike(known: tuple[int, ...], empty: tuple[int, ...]) -> bool:
    return len(known) == len(empty) and all(b in (a, 0) for a, b in zip(known, empty, strict=True))


class InferredDims:
    """The reshapes of a step, as replicas with rows have made them.

    Attributes:
        has_guessed: Whether a replica without rows needed a dim that is not known.
    """

    def __init__(self) -> None:
        # For each place in a program, the reshapes by their turn.
        self._known: dict[Place, dict[int, _Reshape]] = defaultdict(dict)
        self.has_guessed = False

    def note(self, place: Place, turn: int, reshape: _Reshape) -> None:
        """Keep a reshape of an array with elements."""
        self._known[place][turn] = reshape

    def find(
        self, place: Place, turn: int, shape: tuple[int, ...], wanted: tuple[int, ...]
    ) -> int | None:
        """Return the dim for which -1 stands; None if it is not known."""
        known = self._known.get(place, {})
        own = known.get(turn)
        if own is not None and own.fits(shape, wanted):
            return own.dim
        # A replica may reach a line more often than another one.
        dims = {r.dim for r in known.values() if r.fits(shape, wanted)}
        if len(dims) == 1:
            return dims.pop()
        self.has_guessed = True
        return _guess(shape, wanted)


def _guess(shape: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    """Return the dim as if each 0 were the number of rows."""
    if shape.count(0) != wanted.count(0):
        return None
    of_row = math.prod(n for n in shape if n)
    others = math.prod(n for n in wanted if n not in (0, _UNKNOWN))
    return None if of_row % others else of_row // others


@dataclasses.dataclass
class ReshapesOfTrace:
    """The reshapes of one trace, in program order."""

    of_step: InferredDims
    turns: Counter[Place] = dataclasses.field(default_factory=Counter)

    def restart(self) -> None:
        """Count from the beginning, because the trace starts again."""
        self.turns.clear()


_TRACE: ContextVar[ReshapesOfTrace | None] = ContextVar("jaxdist_reshapes", default=None)


@contextlib.contextmanager
def infer_dims(of_step: InferredDims) -> Iterator[ReshapesOfTrace]:
    """Note reshapes of arrays with rows in the block, and infer -1 for those without."""
    _install()
    found = ReshapesOfTrace(of_step)
    with set_in_block(_TRACE, found):
        yield found


@functools.cache
def _install() -> None:
    original: Any = getattr(_array_methods, _COMPUTE)

    def compute_newshape(array: Any, newshape: Any) -> Any:
        trace = _TRACE.get()
        wanted = None if trace is None else _as_sizes(newshape)
        if trace is None or wanted is None or wanted.count(_UNKNOWN) != 1:
            return original(array, newshape)
        place, at, shape = _find_place(), wanted.index(_UNKNOWN), tuple(array.shape)
        turn = trace.turns[place]
        trace.turns[place] += 1
        if 0 not in shape:
            found = original(array, newshape)
            trace.of_step.note(place, turn, _Reshape(shape, wanted, found[at]))
            return found
        if 0 not in wanted:
            return original(array, newshape)
        dim = trace.of_step.find(place, turn, shape, wanted)
        return original(array, newshape if dim is None else (*wanted[:at], dim, *wanted[at + 1 :]))

    setattr(_array_methods, _COMPUTE, compute_newshape)


def _as_sizes(newshape: Any) -> tuple[int, ...] | None:
    try:
        sizes = [newshape] if not hasattr(newshape, "__iter__") else newshape
        return tuple(operator.index(n) for n in sizes)
    except Exception:  # JAX refuses such a dim with its own error.
        return None


def _find_place() -> Place:
    """Return the place outside of JAX that reshapes."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and _is_of_jax(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _is_of_jax(name: str) -> bool:
    return name == "jax" or name.startswith(("jax.", "jax._src."))
