"""`all_reduce_spec`: the algorithm, the number of shards and the largest tensor of each entry."""

import dataclasses
from typing import Any

from jaxdist._called import refuse
from jaxdist._collectives.algorithms import check_name
from jaxdist._validate import show

_CALLER = "MultiWorkerAllReduce"


@dataclasses.dataclass(frozen=True)
class AllReduceSpec:
    """One entry of a spec; a limit of -1 means no limit."""

    alg: str
    shards: int = 1
    limit: int = -1


def parse_specs(given: Any) -> tuple[AllReduceSpec, ...]:
    """Return the entries of a name, a tuple, a named tuple or a list of tuples.

    Raises:
        ArgumentError: A type, a length or an algorithm is wrong, shards are below 1, or the limits
            do not increase or do not end in -1.
    """
    if isinstance(given, str):
        entries = [_parse_entry((given,), given)]
    elif isinstance(given, tuple) and given and all(isinstance(one, tuple) for one in given):
        # One tuple is one entry, so this is most likely a list in the wrong brackets.
        raise refuse(
            f"all_reduce_spec={given!r}, a tuple of tuples.",
            "A tuple is one entry, (algorithm, shards, limit in bytes); several are a list.",
            f"Write a list: {list(given)!r}.",
        )
    elif isinstance(given, tuple):
        entries = [_parse_entry(given, given)]
    elif isinstance(given, list) and given:
        entries = [_parse_entry(one, given) for one in given]
    else:
        raise refuse(
            f"all_reduce_spec={show(given)}.",
            "all_reduce_spec is the name of an algorithm, a tuple (algorithm, shards, limit in "
            "bytes), or a list of such tuples.",
            "Pass for instance ('pscpu/pscpu', 2, -1).",
        )
    limits = [e.limit for e in entries]
    rising = limits[:-1] == sorted(set(limits[:-1]))
    if limits[-1] != -1 or -1 in limits[:-1] or not rising:
        raise refuse(
            f"all_reduce_spec={given!r}, with the limits {limits}.",
            "Limits increase from entry to entry, and the last one is -1, for all larger tensors.",
            f"Pass for instance limits {_suggest_limits(limits)}.",
        )
    return tuple(entries)


def _parse_entry(one: Any, given: Any) -> AllReduceSpec:
    """Return one entry, checked."""
    if not isinstance(one, tuple):
        raise refuse(
            f"all_reduce_spec={given!r:.200} with the entry {show(one)}.",
            "Each entry is a tuple (algorithm, shards, limit in bytes).",
            "Pass for instance [('pscpu/pscpu', 2, -1)].",
        )
    if not 1 <= len(one) <= 3:
        raise refuse(
            f"all_reduce_spec={given!r}: {one!r} has {len(one)} elements.",
            "An entry has one to three elements: (algorithm, shards, limit in bytes).",
            "Pass for instance ('pscpu/pscpu', 2, -1).",
        )
    alg, shards, limit = (*one, *(1, -1)[len(one) - 1 :])
    check_name(alg)
    for name, value, least in (("shards", shards, 1), ("limit", limit, -1)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise refuse(
                f"all_reduce_spec={given!r}, with {name}={value!r} in {one!r}.",
                "shards is an integer from 1 up; limit is a number of bytes, or -1 for none.",
                f"Pass for instance ({alg!r}, 1, -1).",
            )
    return AllReduceSpec(str(alg), int(shards), int(limit))


def _suggest_limits(limits: list[int]) -> list[int]:
    """Return valid limits that are similar to the wrong ones, for the error."""
    return [*sorted({n for n in limits if n >= 0})[: len(limits) - 1], -1]
