"""Reading compiled programs."""

import dataclasses
import re

_LINE = re.compile(
    r"=\s*(?P<result>\([^=]*?\)|\S+)\s+"
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE = re.compile(r"(?P<dtype>pred|[a-z]+\d+[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(?P<groups>\{\{.*?\}\}|\{\}|mesh\[.*?\] \{.*?\}|\[[\d,]+\]<=[^ ,]+)"
)


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective operation of a compiled program."""

    kind: str
    operands: int
    bytes_per_device: int
    replica_groups: str


def collectives(text: str) -> tuple[CompiledCollective, ...]:
    """The collectives in optimized HLO text, in program order.

    Args:
        text: What `jax.stages.Compiled.as_text` gives.

    Returns:
        One entry for each operation. `bytes_per_device` is the size of its results on one device.

    Example:
        >>> collectives("%r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add")
        (CompiledCollective(kind='all-reduce', operands=1, bytes_per_device=16, \
replica_groups='{{0,1}}'),)
    """
    found = []
    for line in text.splitlines():
        # Long tuples are numbered in between: (f32[4], ..., /*index=5*/f32[4]).
        match = _LINE.search(_COMMENT.sub("", line))
        if match is None:
            continue
        groups = _GROUPS.search(match["rest"])
        found.append(
            CompiledCollective(
                match["kind"],
                _count_operands(match["operands"]),
                sum(_bytes(m["dtype"], m["dims"]) for m in _SHAPE.finditer(match["result"])),
                groups["groups"] if groups else "{}",
            )
        )
    return tuple(found)


def _count_operands(text: str) -> int:
    return text.count("%") or (text.count(",") + 1 if text.strip() else 0)


def _bytes(dtype: str, dims: str) -> int:
    count = 1
    for d in dims.split(","):
        count *= int(d) if d else 1
    bits = re.search(r"\d+", dtype)
    return count * (max(int(bits[0]) // 8, 1) if bits else 1)
