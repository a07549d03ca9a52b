"""What `explain` shows of attention whose positions are divided."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdist.nn._attention import kernel
from jaxdist.nn._attention.division import Division, Kind


def list_facts(
    kind: Kind, division: Division, q: Any, k: Any, *, has_segments: bool
) -> Mapping[str, str]:
    """Return what a call does, by name.

    Args:
        kind: How devices meet.
        division: How positions are divided.
        q: The queries of a replica, `[b, s, heads, d]`.
        k: The keys of a replica.
        has_segments: Whether a position sees only those of its segment.
    """
    size, rows = division.size, q.shape[1] // division.size
    forward, backward = kind.count_bytes(q, k, size)
    facts = {
        "kind": f"{kind.name}, {division.order.name} order over {size} devices of the axis "
        f"{division.axis!r}",
        "positions": f"{q.shape[1]:,}, {rows:,} on a device",
        # Fewer where another axis splits heads or rows.
        "a device sends": f"at most {forward:,} bytes, and {backward:,} for the gradient",
    }
    if division.plan.causal:
        seen, every, longest = count_blocks(kind, division, q)
        also = ", and what segments hide" if has_segments else ""
        facts["masked"] = f"{1 - seen / every:.1%} of the pairs of blocks are skipped{also}"
        more = longest * division.size / seen
        facts["balance"] = (
            "each device has the same work"
            if more < _EVEN
            else f"{more:.2f} times the mean work, since devices wait for each other"
        )
    return facts


_EVEN = 1.005


def count_blocks(kind: Kind, division: Division, q: Any) -> tuple[int, int, int]:
    """Return numbers of pairs of blocks: computed, all, and those of the slowest device.

    A device of `"ring"` waits in each turn for the one that computes most.
    """
    plan, size = division.plan, division.size
    length = q.shape[1] // size
    of = [division.order.place(i, np.arange(length), length) for i in range(size)]
    if kind.has_all_positions:
        # Each device computes some heads of all positions.
        of_heads: Any = jax.ShapeDtypeStruct(
            (*q.shape[:2], q.shape[2] // size, q.shape[3]), q.dtype
        )
        rows = kernel.rows_per_block(plan, of_heads, q.shape[1])
        numbers = np.concatenate(of)
        pairs = _find_seen(plan, numbers, numbers, rows)
        return size * int(pairs.sum()), size * pairs.size, int(pairs.sum())
    own: Any = jax.ShapeDtypeStruct((q.shape[0], length, *q.shape[2:]), q.dtype)
    rows = kernel.rows_per_block(plan, own, length)
    pairs = [[_find_seen(plan, ours, theirs, rows) for theirs in of] for ours in of]
    counts = np.array([[x.sum() for x in row] for row in pairs])
    longest = int(counts.sum(1).max())
    if kind.is_in_turns:
        turns = np.array(
            [[row[(i - t) % size] for i, row in enumerate(counts)] for t in range(size)]
        )
        longest = int(turns.max(1).sum())
    return int(counts.sum()), sum(x.size for row in pairs for x in row), longest


def _find_seen(plan: kernel.Plan, rows: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Return for each block of rows and of keys whether some row sees some key."""
    of_keys = kernel.keys_per_block(plan, len(keys))
    last = np.array([rows[i : i + size].max() for i in range(0, len(rows), size)])
    first = np.array([keys[i : i + of_keys].min() for i in range(0, len(keys), of_keys)])
    return last[:, None] >= first[None]
