"""Comparison of a `reduce` or `gather` with those of the other processes, before it runs first."""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import HERE, get_agreement, get_settings, report_deadline, tell_blame
from jaxdist._values import PerReplica
from jaxdist.errors import DeadlineExceededError, OtherProcessError, ProgramMismatchError


def check_same_call(
    caller: str,
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
        caller: The method.
        arguments: Its arguments without the value, by name.
        named: The leaves of the value, by name.
        layout: The mesh of the strategy.
        seconds: How long to wait for the others; None means `collective_seconds`.

    Raises:
        ProgramMismatchError: The calls differ.
        DeadlineExceededError: A process does not make it.
        UnavailableError: A process has ended.
    """
    agreement = get_agreement() if layout.is_shared else None
    if agreement is None:
        return
    own = {"method": caller, **{k: str(v) for k, v in arguments.items()}}
    own |= {name: _describe(leaf) for name, leaf in named.items()}
    HERE.enter(f"comparing a call of {caller}", in_wait=True)
    try:
        texts = agreement.gather(
            "calls", json.dumps(own), seconds, purpose=f"the arguments of {caller}"
        )
    except DeadlineExceededError as error:
        limit = get_settings().collective_seconds if seconds is None else seconds
        raise report_deadline(caller, limit, error) from None
    except OtherProcessError as error:
        tell_blame(error.processes)
        raise
    finally:
        HERE.leave()
    said: list[dict[str, str]] = [json.loads(text) for text in texts]
    common = max(said, key=said.count)
    # With two processes nobody knows who is wrong: process 0 counts as right.
    right = said[0] if said.count(common) == said.count(said[0]) else common
    odd = [i for i, one in enumerate(said) if one != right]
    if not odd:
        return
    there = said[odd[0]]
    what = next(k for k in {**right, **there} if right.get(k) != there.get(k))
    tell_blame(odd)
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
        return "values of single replicas"  # of which the shapes may differ, and are compared later
    held = leaf.array if isinstance(leaf, PerReplica) else leaf
    if not hasattr(held, "dtype"):
        return type(held).__name__
    kind = type(leaf).__name__ if isinstance(leaf, PerReplica) else "array"
    return f"{kind} {held.dtype}{list(getattr(held, 'shape', ()))}"
