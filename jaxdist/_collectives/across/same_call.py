"""Compares a `reduce` or `gather` with those of the other processes, before its first run."""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist import _processes
from jaxdist._called import name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import PerReplica, array_of
from jaxdist.errors import ProgramMismatchError


def check_same_call(
    arguments: Mapping[str, Any],
    named: Mapping[str, Any],
    layout: ReplicaMesh,
    seconds: float | None,
) -> None:
    """Raise if the processes do not make the same call on values of the same shapes.

    XLA would match the collective of this call with whatever the other processes do next.

    Cost:
        In a job of several processes, one exchange over the key-value store.

    Args:
        arguments: Its arguments without the value, by name.
        named: The leaves of the value, by name.
        layout: The mesh of the strategy.
        seconds: How long to wait for the others; None means `collective_seconds`.

    Raises:
        ProgramMismatchError: The calls differ.
        DeadlineExceededError: A process does not make the call in time.
        UnavailableError: A process has ended.
    """
    if not layout.is_shared:
        return
    caller = name_call()
    own = {"method": caller, **{k: str(v) for k, v in arguments.items()}}
    own |= {name: _describe(leaf) for name, leaf in named.items()}
    texts = _processes.exchange(
        caller, "calls", json.dumps(own), seconds, f"the arguments of {caller}"
    )
    odd, usual = _processes.find_odd_ones(texts)
    if not odd or usual is None:
        return
    there: dict[str, str] = json.loads(texts[odd[0]])
    right: dict[str, str] = json.loads(texts[usual])
    what = next(k for k in {**right, **there} if right.get(k) != there.get(k))
    _processes.tell_blame(odd)
    raise ProgramMismatchError(
        f"{caller}: process {odd[0]} makes another call: {what} is {there.get(what, 'nothing')}, "
        f"and {right.get(what, 'nothing')} elsewhere.\n\n"
        "All processes of a job make the same calls, in the same order, on values of the same "
        "shapes.\n\n"
        "Look for code that depends on the process: a condition on the process or the host, or a "
        "loop whose length differs.",
        odd,
    )


def _describe(leaf: Any) -> str:
    if isinstance(leaf, PerReplica) and not leaf.is_global:
        return "values of single replicas"  # their shapes may differ, and are compared later
    held = array_of(leaf)
    if not hasattr(held, "dtype"):
        return type(held).__name__
    kind = type(leaf).__name__ if isinstance(leaf, PerReplica) else "array"
    return f"{kind} {held.dtype}{list(getattr(held, 'shape', ()))}"
