"""How an all-reduce goes, in words and numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AllReducePlan:
    """How an all-reduce goes, and why; `explain` shows it.

    `alternatives` are all algorithms that there were, with the seconds that each would take;
    `pack_bytes` is the size of the largest pack that was asked for, 0 where none was.
    """

    algorithm: str
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    ignored: tuple[str, ...] = ()
    pack_bytes: int = 0
