"""Leaves that a collective refuses: sparse matrices of JAX, and `IndexedSlices` in a gather."""

from typing import Any

from jaxdist._called import refuse
from jaxdist._values import PerReplica, is_slices, is_sparse
from jaxdist.errors import UnsupportedError


def join_slices(value: Any) -> Any:
    """Return `IndexedSlices` of per-replica parts, if a `PerReplica` has slices on each replica."""
    if isinstance(value, PerReplica) and not value.is_global:
        parts = value.values
        if all(is_slices(p) for p in parts):
            first = parts[0]
            return first.with_parts(
                PerReplica([p.values for p in parts]), PerReplica([p.indices for p in parts])
            )
    return value


def refuse_sparse(value: Any) -> None:
    """Refuse a sparse matrix of JAX, whose indices would be combined like its numbers.

    Raises:
        UnsupportedError: `value` is a sparse matrix.
    """
    if is_sparse(value):
        kind = type(value).__name__
        raise refuse(
            f"a {kind}: {value!r}.",
            "Its indices are arrays like its numbers, and would be combined with those of other "
            "replicas.",
            "Pass jaxdist.IndexedSlices(value.data, value.indices[:, 0], value.shape) for rows; "
            f"value.todense(); or value.data alone, where the {kind}s of all replicas have the "
            "same indices.",
            kind=UnsupportedError,
        )


def refuse_slices(name: str, value: Any) -> None:
    """Refuse `IndexedSlices` where whole arrays are concatenated.

    Raises:
        UnsupportedError: `value` is `IndexedSlices`, a `PerReplica` of them, or a sparse matrix.
    """
    refuse_sparse(value)
    if is_slices(join_slices(value)):
        raise refuse(
            f"{name}, which is IndexedSlices.",
            "IndexedSlices of all replicas, concatenated, mean the sum of the arrays, and not the "
            "arrays one after the other.",
            "Gather the arrays: slices.to_dense(). For the sum use reduce('SUM', slices); for the "
            "rows themselves gather slices.values and slices.indices.",
            kind=UnsupportedError,
        )
