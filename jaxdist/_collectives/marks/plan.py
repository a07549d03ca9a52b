"""The plan of an all-reduce, in words and numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AllReducePlan:
    """How an all-reduce is computed, and why; `explain` shows it.

    `alternatives` are all possible algorithms, each with its predicted seconds. `pack_bytes` is the
    size of the largest pack if the caller asked for packs, else 0.
    """

    algorithm: str
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    ignored: tuple[str, ...] = ()
    pack_bytes: int = 0


NO_PLAN = AllReducePlan("", "")
