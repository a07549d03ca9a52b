"""Marks in the program of a model: calls of functions whose names the proofs know.

Only a program that is traced for a proof has marks, not the step itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax

from jaxdist import _compat

# Values that each replica computes from its own rows, as `docs/how-to/keras.md` says: the
# statistics of `BatchNormalization`.
OWN_STATISTICS = "jaxdist_keras_own_statistics"
# The sum of a value over the replicas.
ADD_UP = "jaxdist_keras_add_up"
_ASSIGNED = "jaxdist_keras_assigned_"

# The numbers of the variables of the model being traced for a proof, by their identity.
_NUMBERS: ContextVar[Mapping[int, int] | None] = ContextVar("jaxdist_keras_proof", default=None)


@contextlib.contextmanager
def trace_with_marks(numbers: Mapping[int, int]) -> Iterator[None]:
    """Let Keras layers mark values in a block; `numbers` has the variables of the model."""
    # Op by op, marks would vanish, and a loop would give new operations for each iteration.
    with _compat.enable_jit(), _compat.set_in_block(_NUMBERS, numbers):
        yield


def are_marked() -> bool:
    """Whether the current trace is for a proof."""
    return _NUMBERS.get() is not None


def mark(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and return its results. The traced program has the call under this name."""

    def call(*values: Any) -> Any:
        return function(*values)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call)(*args)


def name_of_mark(eqn: Any) -> str | None:
    """Return the name of a mark; None for other operations."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    name = str(eqn.params.get("name", ""))
    return name if name.startswith("jaxdist_keras_") else None


def number_of_assigned(name: str) -> int | None:
    """Return the number of the variable that a mark assigns; None for other marks."""
    return int(name.removeprefix(_ASSIGNED)) if name.startswith(_ASSIGNED) else None


def mark_assigned(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Return `assign` of Keras' variables; it marks the values that later reads see."""

    @functools.wraps(assign)
    def assign_marked(self: Any, value: Any) -> Any:
        numbers = _NUMBERS.get()
        number = None if numbers is None else numbers.get(id(self))
        if number is not None:
            value = self._convert_to_tensor(value, dtype=self._dtype)
            value = mark(f"{_ASSIGNED}{number}", lambda x: x, value)
        return assign(self, value)

    return assign_marked
