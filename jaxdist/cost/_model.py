"""The predicted time of an all-reduce, by algorithm: latency of its steps plus bytes / bandwidth.

There are n replicas with S bytes each. `xla` is XLA's own algorithm: between CPU devices as
measured, elsewhere the least time that any exchange of messages needs. So another algorithm is
chosen there only if XLA's own was measured to be slower.

`xring` has 2(n-1) steps of S/n. `rechd` has 2 log2 n steps of together 2(n-1)/n S, and a step of S
before and after if n is not a power of two. `psgpu` has 2 log2 n steps of S. `a/b` reduce-scatters
within a worker with a, reduces 1/local of the bytes across workers with b, and gathers within a
worker.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxdist._called import called, refuse
from jaxdist._validate import (
    as_integer,
    as_list,
    as_number,
    check_instance,
    check_text,
)
from jaxdist.cost._link import Link, Links, Medium
from jaxdist.cost._nccl import predict_nccl
from jaxdist.cost._table import TABLE

_FLAT = ("xla", "xring", "rechd", "psgpu", "pscpu")
ALGORITHMS = (*_FLAT, "xla/xla", "xla/xring", "xla/rechd", "xla/pscpu", "pscpu/pscpu")
_ALIASES = {"nccl": "xla"}
MOST = 1 << 40  # replicas, operands or groups


class _Traffic(NamedTuple):
    """The messages of an algorithm: steps, bytes of the busiest device, bytes of all devices."""

    steps: int
    busiest: float
    total: float


@called("cost.pack_below")
def pack_below(link: Link) -> int:
    """Return the size in bytes below which copying a leaf into a common buffer saves time.

    Copying S bytes in and out takes 2 S / B_mem. One message fewer saves alpha.

    Example:
        >>> from jaxdist import cost
        >>> cost.pack_below(cost.links_of(MirroredStrategy().layout).inner)
        159600
    """
    check_instance("link", link, Link, "a cost.Link", "Pass a row of cost.TABLE.")
    return int(link.alpha * link.memory_bytes_per_second / 2)


@called("cost.seconds")
def seconds(
    algorithm: str,
    num_replicas: int,
    num_bytes: int,
    links: Links,
    local: int | None = None,
    num_operands: int = 1,
) -> float:
    """Return the predicted time of one all-reduce.

    Args:
        algorithm: One of `ALGORITHMS`, or any `a/b` of the flat ones; `nccl` is `xla`.
        num_replicas: The number of replicas.
        num_bytes: The bytes of all operands on one replica.
        links: The links between the replicas.
        local: The replicas of one worker; None if there is one worker.
        num_operands: The number of arrays that are reduced together. Between CPU devices, each is a
            message of its own.

    Raises:
        ArgumentError: The algorithm is unknown, or `local` does not divide `num_replicas`.

    Example:
        >>> from jaxdist import cost
        >>> links = cost.Links(cost.TABLE["tpu-v5e-ici"])
        >>> f"{cost.seconds('xring', 4, 4_000_000, links):.2e}"
        '3.60e-05'

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
        MPICH (2005).
    """
    n = as_integer("num_replicas", num_replicas, least=1, most=MOST)
    inside = n if local is None else as_integer("local", local, least=1, most=n)
    as_number("num_bytes", num_bytes, least=0)
    check_instance("links", links, Links, "a cost.Links", "Pass cost.links_of(layout).")
    num_operands = as_integer("num_operands", num_operands, least=1, most=MOST)
    _check_algorithm(algorithm, n, inside)
    if n == 1:
        return 0.0
    first, _, second = algorithm.partition("/")
    first, second = _ALIASES.get(first, first), _ALIASES.get(second, second)
    by_nccl = predict_nccl("all-reduce", n, num_bytes, links, inside)
    if by_nccl is None:
        # A size curve holds for groups whose links all have one.
        links = Links(_without_curve(links.inner), links.outer and _without_curve(links.outer))
        return _predict(first, second, n, num_bytes, links, inside, num_operands)
    if algorithm in ("xla", "nccl"):
        return by_nccl
    # Any other algorithm consists of many NCCL operations, each with a launch, so it is never
    # predicted to beat a single operation.
    return max(by_nccl, _predict(first, second, n, num_bytes, links, inside, num_operands))


@called("cost.cheapest", replaces="cost.seconds", arguments={"algorithm=": "algorithms with "})
def cheapest(
    num_replicas: int,
    num_bytes: int,
    links: Links,
    local: int | None = None,
    algorithms: Sequence[str] = ALGORITHMS,
) -> list[tuple[str, float]]:
    """Return every possible algorithm with its predicted seconds, the fastest first.

    Equally fast ones keep the order of `algorithms`. Algorithms with two levels are omitted if
    there is only one level.

    Example:
        >>> from jaxdist import cost
        >>> links = cost.links_of(MirroredStrategy().layout)
        >>> cost.cheapest(8, 4096, links)[0][0]
        'xla'
    """
    num_replicas = as_integer("num_replicas", num_replicas, least=1, most=MOST)
    remedy = "Pass for instance algorithms=cost.ALGORITHMS."
    algorithms = as_list("algorithms", algorithms, "a list of names", remedy, kind=str)
    inside = num_replicas
    if local is not None:
        inside = as_integer("local", local, least=1, most=num_replicas)
    two_levels = 1 < inside < num_replicas
    possible = [a for a in algorithms if two_levels or "/" not in a]
    timed = [(a, seconds(a, num_replicas, num_bytes, links, local)) for a in possible]
    # The sort is stable and compares no names, so by default XLA's own algorithm wins a tie.
    return sorted(timed, key=lambda pair: pair[1])


def _predict(
    first: str, second: str, n: int, size: float, links: Links, inside: int, operands: int
) -> float:
    """Return the time of an algorithm of one level, or of two."""
    if second:
        return _predict_two_levels(first, second, n // inside, inside, size, links, operands)
    if first == "xla" and inside < n and links.across.medium is Medium.WIRE:
        return _predict_xla_over_wires(n, size, links, inside)
    # An algorithm of one level waits for the slowest link at each step.
    over = {links.inner} if inside == n else {links.inner, links.across}
    return max(predict_flat(first, n, size, link, operands) for link in over)


def predict_flat(
    name: str, n: int, size: float, link: Link, num_operands: int = 1, groups: int = 1
) -> float:
    """Return the time of one level; `groups` groups of `n` replicas work at the same time."""
    if n == 1:
        return 0.0
    if name == "pscpu" and not link.medium.is_shared:
        return _predict_on_host(n, size, link)
    by_nccl = predict_nccl("all-reduce", n, size, Links(link), n) if name == "xla" else None
    if by_nccl is not None:
        return by_nccl
    if name == "xla" and not link.medium.is_shared:
        # For few bytes, exchanging whole arrays takes fewer steps than a reduce-scatter and an
        # all-gather.
        whole = log2(n) * (link.alpha + size / link.bytes_per_second)
        return min(whole, _predict_scatter_gather(n, size, link))
    traffic = _count_traffic(name, n, size, link.medium)
    if link.curve is not None:
        reached = link.curve.part * link.bytes_per_second
        return traffic.steps * link.curve.step_seconds + traffic.busiest / reached
    if not link.medium.is_shared:
        return traffic.steps * link.alpha + traffic.busiest / link.bytes_per_second
    # All replicas wait for the same cores, at every operand of every step. See Note [Shared media].
    waits = traffic.steps * num_operands * n * groups
    return waits * link.alpha + groups * traffic.total / link.bytes_per_second


def _count_traffic(name: str, n: int, size: float, medium: Medium) -> _Traffic:
    """Return the messages of an algorithm of one level."""
    if name == "xla" and medium is Medium.MEMORY:
        # Threads read each other's arrays, so each array is read once and nothing is sent.
        return _Traffic(1, size, n * size)
    if name in ("xla", "xring"):
        steps = 1 if name == "xla" else 2 * (n - 1)
        return _Traffic(steps, 2 * (n - 1) / n * size, 2 * (n - 1) * size)
    if name == "rechd":
        power = 1 << (n.bit_length() - 1)
        rest = n - power
        exchanged = 2 * (power - 1) / power * size
        around = 2 if rest else 0
        steps = 2 * log2(power) + around
        return _Traffic(steps, exchanged + around * size, power * exchanged + 2 * rest * size)
    return _Traffic(2 * log2(n), 2 * log2(n) * size, 2 * (n - 1) * size)


def _predict_two_levels(
    first: str, second: str, workers: int, local: int, size: float, links: Links, operands: int
) -> float:
    """Return the time of a reduce-scatter inside, an all-reduce across, and a gather inside."""
    link = links.inner
    if first == "xla" and not link.medium.is_shared:
        within = _predict_scatter_gather(local, size, link)
    else:
        # A reduce-scatter and an all-gather are two operations; XLA's all-reduce is one.
        halves = 2 * operands if first == "xla" else operands
        within = predict_flat(first, local, size, link, halves, workers)
    # All `local` groups across workers work at the same time.
    across = predict_flat(second, workers, size / local, links.across, operands, local)
    return within * link.scatter_gather + across


def _predict_scatter_gather(n: int, size: float, link: Link) -> float:
    """Return the time of a reduce-scatter and an all-gather over wires."""
    by_nccl = predict_nccl("all-gather", n, size, Links(link), n)
    if by_nccl is not None:
        return 2 * by_nccl
    return 2 * log2(n) * link.alpha + 2 * (n - 1) / n * size / link.bytes_per_second


def _predict_xla_over_wires(n: int, size: float, links: Links, local: int) -> float:
    """Return the time of XLA's all-reduce between workers with wires.

    It uses the links of both levels at the same time.
    """
    workers = n // local
    inner, outer = links.inner, links.across
    latency = log2(local) * inner.alpha + log2(workers) * outer.alpha
    inside = 2 * (local - 1) / local * size / inner.bytes_per_second
    across = 2 * (workers - 1) / workers * size / local / outer.bytes_per_second
    whole = (
        latency
        + log2(local) * size / inner.bytes_per_second
        + log2(workers) * size / outer.bytes_per_second
    )
    return min(
        2 * latency + max(inside, across),
        _predict_two_levels("xla", "xla", workers, local, size, links, 1),
        whole,
        # If the sizes of the levels are not powers of two, two levels may need more steps than one.
        max(predict_flat("xla", n, size, link) for link in (inner, outer)),
    )


def _predict_on_host(n: int, size: float, link: Link) -> float:
    """Return the time of an all-gather, and a sum on the host with copies to it and back."""
    host = TABLE["pcie-3"]
    gather = (n - 1) * (link.alpha + size / link.bytes_per_second)
    copies = 2 * host.alpha + (n + 1) * size / host.bytes_per_second
    return gather + copies + n * size / TABLE["cpu-threads"].memory_bytes_per_second


def _without_curve(link: Link) -> Link:
    """Return a link without the size curve of NCCL."""
    return link if link.curve is None else dataclasses.replace(link, curve=None)


def log2(n: int) -> int:
    """Return the number of doubling steps for n replicas."""
    return math.ceil(math.log2(n)) if n > 1 else 0


def _check_algorithm(algorithm: str, num_replicas: int, local: int) -> None:
    """Refuse an unknown algorithm, and workers of different sizes."""
    check_text("algorithm", algorithm, "xla")
    parts = [_ALIASES.get(p, p) for p in algorithm.split("/")]
    if len(parts) > 2 or not all(p in _FLAT for p in parts):
        raise refuse(
            f"algorithm={algorithm!r}, and there is no all-reduce of that name.",
            f"An algorithm is one of {list(ALGORITHMS)}, or two of {list(_FLAT)} with a / between "
            "them.",
            "Pass for instance 'xla'.",
        )
    if num_replicas % local:
        raise refuse(
            f"num_replicas={num_replicas} and local={local}.",
            "All workers have the same number of replicas, local.",
            f"Pass a divisor of {num_replicas} as local.",
        )
