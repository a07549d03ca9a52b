"""Warns, at the user's line, of a step that is traced again and again."""

import dataclasses
import functools
import sys
import warnings
import weakref
from collections import Counter, deque
from typing import Any

from jaxdist import _compat
from jaxdist.errors import RetraceWarning

# Users often trace a step twice on purpose (a smaller last batch, evaluation), but seldom more.
NEW_FUNCTIONS_BEFORE_WARNING = 3
PROGRAMS_BEFORE_WARNING = 8
# A loop that compiles in every step must not fill the memory.
MOST_KEPT = 1000


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program that a strategy compiled.

    Attributes:
        function: The name of the step.
        source: The `file:line` where it was defined.
        why: How the call differs from the one that was compiled before it; None for the first
            program of a function.
    """

    function: str
    source: str
    why: str | None


class RetraceWatch:
    """Counts the programs of each function, and the function objects made from the same code."""

    def __init__(self) -> None:
        self.compilations: deque[Compilation] = deque(maxlen=MOST_KEPT)
        self._functions: Counter[Any] = Counter()
        self._warned: set[Any] = set()
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def count_function(self, fn: Any) -> None:
        """Count a function object that runs for the first time; warn if its code made several."""
        self._keep(fn, None)
        code = getattr(fn, "__code__", None)
        # A loop that defines a lambda makes a new object each time, but its code is one object.
        # With other options, the same function is compiled once more.
        if code is None or fn in self._counted:
            return
        self._counted.add(fn)
        self._functions[code] += 1
        if self._functions[code] < NEW_FUNCTIONS_BEFORE_WARNING or code in self._warned:
            return
        self._warned.add(code)
        warnings.warn(
            f"strategy.run got {self._functions[code]} different function objects made by the "
            f"same code, {fn.__qualname__} at {source_location(fn)}.\n\n"
            "A new function or lambda in every step is traced and compiled again in every "
            "step.\n\nDefine it once, outside the loop, and pass what changes as an argument.",
            RetraceWarning,
            stacklevel=user_stack_level(),
        )

    def count_program(self, fn: Any, count: int, changed: str) -> None:
        """Count the `count`-th signature of `fn`; `changed` says how it differs from the last."""
        self._keep(fn, changed)
        # One warning for each function is enough.
        if count < PROGRAMS_BEFORE_WARNING or id(fn) in self._warned:
            return
        self._warned.add(id(fn))
        warnings.warn(
            f"{getattr(fn, '__qualname__', fn)!s} at {source_location(fn)} has been traced "
            f"for {count} different signatures; the last one differs in {changed}.\n\n"
            "Every new shape, dtype, layout or Python constant is a program of its own.\n\n"
            "Pad batches to one shape; pass numbers as arrays instead of strings or booleans.",
            RetraceWarning,
            stacklevel=user_stack_level(),
        )

    def _keep(self, fn: Any, why: str | None) -> None:
        name = getattr(fn, "__name__", type(fn).__name__)
        self.compilations.append(Compilation(name, source_location(fn), why))


def source_location(fn: Any) -> str:
    """Return the `file:line` where a function, or the call of an object, was defined."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__wrapped__", fn)
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "an unknown place"


def user_stack_level() -> int:
    """Return the `stacklevel` that makes a warning from the caller show the user's line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_compat.PACKAGE):
        frame = frame.f_back
        level += 1
    return level
