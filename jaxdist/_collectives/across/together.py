"""Checks that the values of all replicas, and the calls of all processes, fit together."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdist import _processes
from jaxdist._called import call_as, name_call, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import format_lines
from jaxdist._values import (
    IndexedSlices,
    PerReplica,
    array_of,
    check_integers,
    explain_too_large,
    is_python_number,
)
from jaxdist.errors import ProgramMismatchError, ReplicaValueError, ShapeError


def check_together(
    named: Mapping[str, Any],
    free: tuple[int, ...] = (),
    *,
    remedy: str = "",
    arguments: str = "",
) -> None:
    """Refuse values whose shapes or dtypes differ between replicas, and name all of them.

    Args:
        named: Values by their names. Only a `PerReplica` that is a list of values can differ.
        free: Dims that may differ.
        remedy: The advice for different shapes, where padding is not the best.
        arguments: Arguments of the call that its name is shown with, such as "(axis=0)".

    Raises:
        ShapeError: Shapes or dtypes differ.
        ReplicaValueError: A Python integer does not fit into JAX's integer dtype.
    """
    caller = ""
    wrong: list[str] = []
    shapes = dtypes = False
    for name, value in named.items():
        if not isinstance(value, PerReplica) or value.is_global:
            continue
        # `IndexedSlices` may have any number of rows on each replica.
        if any(isinstance(v, IndexedSlices) for v in value.values):
            continue
        # Only for a list of values: it looks at all callers.
        caller = caller or f"{name_call()}{arguments}"
        # Checked first: an integer that is too large has no dtype to compare.
        for replica, v in enumerate(value.values):
            check_integers(f"{caller}: {name}", replica, v)
        own = [np.shape(v) for v in value.values]
        kinds = [_find_jax_dtype(v) for v in value.values]
        differ = len({_mask_free_dims(s, free) for s in own}) > 1, len(set(kinds)) > 1
        shapes, dtypes = shapes or differ[0], dtypes or differ[1]
        if any(differ):
            holders: dict[str, list[int]] = {}
            for replica, (kind, shape) in enumerate(zip(kinds, own, strict=True)):
                holders.setdefault(f"{kind}{list(shape)}", []).append(replica)
            each = ", ".join(f"replicas {have}: {what}" for what, have in holders.items())
            wrong.append(f"{name}: {each}")
    if not wrong:
        return
    advice = ["Cast them to one dtype first (x.astype)."] if dtypes else []
    advice += [remedy or "Pad them to one shape first, with a mask."] if shapes else []
    but_for = f", but for dim {', '.join(map(str, free))}" if free else ""
    raise call_as(
        caller,
        refuse,
        f"{len(wrong)} value{'s' * (len(wrong) > 1)} that differ{'s' * (len(wrong) == 1)} between "
        f"replicas:\n{format_lines(wrong)}",
        f"All replicas must pass values of one dtype and one shape{but_for}.",
        " ".join(advice),
        kind=ShapeError,
    )


def check_sum(
    name: str,
    value: PerReplica,
    dims: int | tuple[int, ...] | None,
) -> None:
    """Refuse a sum of Python integers that does not fit into JAX's integer dtype."""
    if value.is_global or not all(is_python_number(v) for v in value.values):
        return
    # As objects, NumPy adds Python integers without overflow. So the sum is compared with the
    # bounds exactly.
    held = [np.asarray(v, object) for v in value.values]
    if not all(type(n) is int for a in held for n in a.flat):
        return
    total = np.asarray(sum(np.asarray(a.sum(axis=dims) if dims is not None else a) for a in held))
    bounds = np.iinfo(_find_jax_dtype(0))
    for n in total.flat:
        if not bounds.min <= n <= bounds.max:
            raise ReplicaValueError(
                f"{name_call()}(SUM, ...) of {name} gives {n}, and "
                f"{explain_too_large(int(n), bounds)}"
            )


def _mask_free_dims(shape: tuple[int, ...], free: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a shape with None at the dims that may differ."""
    rank = len(shape)
    dims = {d % rank for d in free if -rank <= d < rank}
    return tuple(None if i in dims else n for i, n in enumerate(shape))


def _find_jax_dtype(value: Any) -> Any:
    """Return the dtype that a value has as an array of JAX."""
    if isinstance(value, int):
        return jax.dtypes.canonicalize_dtype(bool if isinstance(value, bool) else int)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    # `canonicalize_dtype` raises for strings, objects, times and random keys. They are refused
    # later, with a better message.
    plain = isinstance(dtype, np.dtype) and dtype.kind not in "OSUM"
    return jax.dtypes.canonicalize_dtype(dtype) if plain else dtype


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
