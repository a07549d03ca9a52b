"""Lowering of programs of which some mesh axes are manual."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jax._src.interpreters import mlir as _mlir

_HERE = threading.local()
_NAME = "lower_with_sharding_in_types"


@contextlib.contextmanager
def without_open_constraints() -> Iterator[None]:
    """Lower in this thread without constraints that say nothing.

    Where some mesh axes are manual and others automatic, JAX constrains the result of nearly every
    operation to a sharding that is open in all dims. The partitioner for TPUs takes such a copy of
    a broadcast number for data: it computes one copy for all arrays of a shape, and sends it
    between devices to those that lie another way. JAX has a note to leave them out; goes then.
    """
    _install()
    before = getattr(_HERE, "without", False)
    _HERE.without = True
    try:
        yield
    finally:
        _HERE.without = before


def _install() -> None:
    original = getattr(_mlir, _NAME, None)
    if original is None or getattr(original, "of_jaxdist", False):
        return

    def lower(context: Any, op: Any, aval: Any, *rest: Any) -> Any:
        if getattr(_HERE, "without", False) and _is_open(aval):
            return op
        return original(context, op, aval, *rest)

    lower.of_jaxdist = True  # type: ignore[attr-defined]
    setattr(_mlir, _NAME, lower)


def _is_open(aval: Any) -> bool:
    """Whether no axis is one whose sharding is part of the type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and not mesh._any_axis_explicit
