"""The time that an all-reduce takes, by algorithm: latency of its steps plus bytes over bandwidth.

n replicas, S bytes on each. `xla` is XLA's own: between CPU devices as it was measured, elsewhere
the least that any exchange of messages can take, so no other is chosen there unless XLA's own was
measured to be slower. `xring` has 2(n-1) steps of S/n, `rechd` 2 log2 n steps of together
2(n-1)/n S (and a step of S before and after where n is no power of two), `psgpu` 2 log2 n steps of
S. `a/b` reduce-scatters inside a worker with a, reduces 1/local of the bytes across workers with b,
and gathers inside.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxdist._validate import (
    Renamed,
    as_integer,
    as_list,
    as_number,
    check_instance,
    check_text,
    shown,
)
from jaxdist.cost._link import Link, Links, Medium
from jaxdist.cost._table import TABLE
from jaxdist.errors import ArgumentError

_FLAT = ("xla", "xring", "rechd", "psgpu", "pscpu")
ALGORITHMS = (*_FLAT, "xla/xla", "xla/xring", "xla/rechd", "xla/pscpu", "pscpu/pscpu")
_ALIASES = {"nccl": "xla"}
# Operations that HLO has.
_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_MOST = 1 << 40  # of replicas, operands and groups


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """What an algorithm sends: steps, the bytes of the busiest device, the bytes of all."""

    steps: int
    busiest: float
    total: float


def pack_below(link: Link) -> int:
    """The bytes under which it pays to copy a leaf into a buffer with others.

    Copying it in and out takes 2 S / B_mem; a message less saves alpha.

    Example:
        >>> from jaxdist import cost
        >>> cost.pack_below(cost.links_of(MirroredStrategy().layout).inner)
        159600
    """
    _check_link("cost.pack_below", link)
    return int(link.alpha * link.memory_bytes_per_second / 2)


def seconds(
    algorithm: str,
    num_replicas: int,
    num_bytes: int,
    links: Links,
    local: int | None = None,
    num_operands: int = 1,
) -> float:
    """The predicted time of one all-reduce.

    Args:
        algorithm: One of `ALGORITHMS`, or any `a/b` of the flat ones; `nccl` is `xla`.
        num_replicas: Replicas that take part.
        num_bytes: Bytes on each of them, of all operands.
        links: What joins them.
        local: Replicas of one worker; None if there is one worker.
        num_operands: Arrays that are reduced together. Between CPU devices each is a message of
            its own.

    Raises:
        ArgumentError: An unknown algorithm, or workers that do not divide the replicas.

    Example:
        >>> from jaxdist import cost
        >>> links = cost.Links(cost.TABLE["tpu-v5e-ici"])
        >>> f"{cost.seconds('xring', 4, 4_000_000, links):.2e}"
        '3.60e-05'

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
        MPICH (2005).
    """
    caller = "cost.seconds"
    n = as_integer(caller, "num_replicas", num_replicas, least=1, most=_MOST)
    inside = n if local is None else as_integer(caller, "local", local, least=1, most=n)
    as_number(caller, "num_bytes", num_bytes, least=0)
    check_instance(caller, "links", links, Links, "a cost.Links", "Pass cost.links_of(layout).")
    num_operands = as_integer(caller, "num_operands", num_operands, least=1, most=_MOST)
    _check(caller, algorithm, n, inside)
    if n == 1:
        return 0.0
    first, _, second = algorithm.partition("/")
    first, second = _ALIASES.get(first, first), _ALIASES.get(second, second)
    if not second:
        if first == "xla" and inside < n and links.across.medium is Medium.WIRE:
            return _xla_over_wires(n, num_bytes, links, inside)
        over = {links.inner} if inside == n else {links.inner, links.across}
        return max(_flat(first, n, num_bytes, link, num_operands) for link in over)
    return _two_levels(first, second, n // inside, inside, num_bytes, links, num_operands)


def collective_seconds(
    kind: str,
    group_size: int,
    num_bytes: int,
    link: Link,
    num_operands: int = 1,
    num_groups: int = 1,
) -> float:
    """The predicted time of one operation of a compiled program over one link.

    Args:
        kind: As HLO names it, such as `all-gather`.
        group_size: Devices that take part together.
        num_bytes: Bytes of the whole: what an all-gather gives, what a reduce-scatter takes.
        link: What joins them.
        num_operands: Arrays in it.
        num_groups: Groups that work at the same time.

    Example:
        >>> from jaxdist import cost
        >>> f"{cost.collective_seconds('all-gather', 4, 8_000_000, cost.TABLE['nvlink-4']):.2e}"
        '2.01e-05'
    """
    caller = "cost.collective_seconds"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArgumentError(
            f"{caller} was given kind={shown(kind)}.\n\n"
            f"kind is one of {', '.join(_KINDS)}.\n\nPass for instance kind='all-gather'."
        )
    n = as_integer(caller, "group_size", group_size, least=1, most=_MOST)
    as_number(caller, "num_bytes", num_bytes, least=0)
    _check_link(caller, link)
    num_operands = as_integer(caller, "num_operands", num_operands, least=1, most=_MOST)
    num_groups = as_integer(caller, "num_groups", num_groups, least=1, most=_MOST)
    if n == 1:
        return 0.0
    if kind == "all-reduce":
        return _flat("xla", n, num_bytes, link, num_operands, num_groups)
    part = 1.0 if kind in ("collective-permute", "collective-broadcast") else (n - 1) / n
    if link.medium.is_shared:
        waits = num_operands * n * num_groups
        total = num_groups * n * part * num_bytes
        return waits * link.alpha + total / link.bytes_per_second * link.scatter_gather / 2
    steps = 1 if kind == "collective-permute" else _log2(n)
    return steps * link.alpha + part * num_bytes / link.bytes_per_second


def cheapest(
    num_replicas: int,
    num_bytes: int,
    links: Links,
    local: int | None = None,
    algorithms: Sequence[str] = ALGORITHMS,
) -> list[tuple[str, float]]:
    """Every algorithm that is possible, with its predicted seconds, the fastest first.

    Of equally fast ones the first of `algorithms` comes first. Those of two levels are left out
    where there is one level.

    Example:
        >>> from jaxdist import cost
        >>> links = cost.links_of(MirroredStrategy().layout)
        >>> cost.cheapest(8, 4096, links)[0][0]
        'xla'
    """
    caller = "cost.cheapest"
    num_replicas = as_integer(caller, "num_replicas", num_replicas, least=1, most=_MOST)
    remedy = "Pass for instance algorithms=cost.ALGORITHMS."
    algorithms = as_list(caller, "algorithms", algorithms, "a list of names", remedy)
    for name in algorithms:
        check_instance(caller, "algorithms", name, str, "a list of names", remedy)
    inside = num_replicas
    if local is not None:
        inside = as_integer(caller, "local", local, least=1, most=num_replicas)
    two_levels = 1 < inside < num_replicas
    possible = [a for a in algorithms if two_levels or "/" not in a]
    with (
        Renamed("cost.seconds", caller),
        Renamed("cost.seconds was given algorithm=", f"{caller} was given algorithms with "),
    ):
        timed = [(a, seconds(a, num_replicas, num_bytes, links, local)) for a in possible]
    return sorted(timed, key=lambda pair: pair[1])


def _flat(
    name: str, n: int, size: float, link: Link, num_operands: int = 1, groups: int = 1
) -> float:
    """One level; `groups` of `n` replicas work at the same time."""
    if n == 1:
        return 0.0
    if name == "pscpu" and not link.medium.is_shared:
        return _on_the_host(n, size, link)
    if name == "xla" and not link.medium.is_shared:
        # The whole of it is exchanged at once where that is little.
        whole = _log2(n) * (link.alpha + size / link.bytes_per_second)
        return min(whole, _halves_of_xla(n, size, link))
    traffic = _traffic(name, n, size, link.medium)
    if not link.medium.is_shared:
        return traffic.steps * link.alpha + traffic.busiest / link.bytes_per_second
    # All replicas wait for the same cores, at every operand of every step.
    waits = traffic.steps * num_operands * n * groups
    return waits * link.alpha + groups * traffic.total / link.bytes_per_second


def _traffic(name: str, n: int, size: float, medium: Medium) -> _Traffic:
    if name == "xla" and medium is Medium.MEMORY:
        return _Traffic(1, size, n * size)
    if name == "xla":
        return _Traffic(1, 2 * (n - 1) / n * size, 2 * (n - 1) * size)
    if name == "xring":
        return _Traffic(2 * (n - 1), 2 * (n - 1) / n * size, 2 * (n - 1) * size)
    if name == "rechd":
        power = 1 << (n.bit_length() - 1)
        rest = n - power
        exchanged = 2 * (power - 1) / power * size
        around = 2 if rest else 0
        steps = 2 * _log2(power) + around
        return _Traffic(steps, exchanged + around * size, power * exchanged + 2 * rest * size)
    return _Traffic(2 * _log2(n), 2 * _log2(n) * size, 2 * (n - 1) * size)


def _two_levels(
    first: str, second: str, workers: int, local: int, size: float, links: Links, operands: int
) -> float:
    """Reduce-scatter inside with `first`, across on 1/local with `second`, gather inside."""
    link = links.inner
    if first == "xla" and not link.medium.is_shared:
        within = _halves_of_xla(local, size, link)
    else:
        # Two operations where XLA's all-reduce is one.
        halves = 2 * operands if first == "xla" else operands
        within = _flat(first, local, size, link, halves, workers)
    across = _flat(second, workers, size / local, links.across, operands, local)
    return within * link.scatter_gather + across


def _halves_of_xla(n: int, size: float, link: Link) -> float:
    """A reduce-scatter and an all-gather over wires."""
    return 2 * _log2(n) * link.alpha + 2 * (n - 1) / n * size / link.bytes_per_second


def _xla_over_wires(n: int, size: float, links: Links, local: int) -> float:
    """XLA's all-reduce between workers with wires: it uses the links of both levels at once."""
    workers = n // local
    inner, outer = links.inner, links.across
    latency = _log2(local) * inner.alpha + _log2(workers) * outer.alpha
    inside = 2 * (local - 1) / local * size / inner.bytes_per_second
    across = 2 * (workers - 1) / workers * size / local / outer.bytes_per_second
    whole = (
        latency
        + _log2(local) * size / inner.bytes_per_second
        + _log2(workers) * size / outer.bytes_per_second
    )
    return min(
        2 * latency + max(inside, across),
        _two_levels("xla", "xla", workers, local, size, links, 1),
        whole,
        # Levels of odd sizes need more steps than one.
        max(_flat("xla", n, size, link) for link in (inner, outer)),
    )


def _on_the_host(n: int, size: float, link: Link) -> float:
    """All-gather, copy everything to the host, add there, copy the sum back."""
    host = TABLE["pcie-3"]
    gather = (n - 1) * (link.alpha + size / link.bytes_per_second)
    copies = 2 * host.alpha + (n + 1) * size / host.bytes_per_second
    return gather + copies + n * size / TABLE["cpu-threads"].memory_bytes_per_second


def _log2(n: int) -> int:
    return math.ceil(math.log2(n)) if n > 1 else 0


def _check_link(caller: str, link: Any) -> None:
    check_instance(caller, "link", link, Link, "a cost.Link", "Pass a row of cost.TABLE.")


def _check(caller: str, algorithm: str, num_replicas: int, local: int) -> None:
    check_text(caller, "algorithm", algorithm, "xla")
    parts = [_ALIASES.get(p, p) for p in algorithm.split("/")]
    if len(parts) > 2 or not all(p in _FLAT for p in parts):
        raise ArgumentError(
            f"{caller} was given algorithm={algorithm!r}, and there is no all-reduce of that name."
            f"\n\nAn algorithm is one of {list(ALGORITHMS)}, or two of {list(_FLAT)} with a / "
            "between them.\n\nPass for instance 'xla'."
        )
    if num_replicas % local:
        raise ArgumentError(
            f"{caller} was given num_replicas={num_replicas} and local={local}.\n\n"
            "All workers have the same number of replicas, local.\n\n"
            f"Pass a divisor of {num_replicas} as local."
        )
