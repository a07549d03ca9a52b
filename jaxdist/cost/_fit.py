"""Fits the latency and the bandwidth of a link to measured times."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, as_list, check_instance
from jaxdist.cost._curve import check_positive
from jaxdist.cost._link import Link, Medium

_SAMPLES = ("a list of cost.Sample", "Pass for instance samples=[cost.Sample(1, 8, 1e-4), ...].")
_MOST_DEVICES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Sample:
    """The measured time of a program that all-reduces `count` arrays of `num_bytes` each."""

    count: int
    num_bytes: int
    seconds: float

    @called("cost.Sample")
    def __post_init__(self) -> None:
        as_integer("count", self.count, least=1)
        as_integer("num_bytes", self.num_bytes, least=0)
        check_positive("seconds", self.seconds)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A link, and how well it explains its samples."""

    link: Link
    dispatch_seconds: float  # of a program, independent of its communication
    error: float  # median of |predicted - measured| / measured


@called("cost.fitted")
def fitted(
    known: Link,
    samples: Sequence[Sample],
    num_devices: int,
    memory_bytes_per_second: float,
    scatter_gather: float,
    source: str,
) -> Fit:
    """Return the link that explains the samples best; it replaces `known`.

    On a shared medium, one operation reduced all arrays of a sample. Over wires, they were reduced
    one after the other.

    Raises:
        ArgumentError: There are fewer samples, sizes or counts than unknowns.

    Example:
        >>> from jaxdist import cost
        >>> cases = [(count, size) for count in (1, 9) for size in (8, 8000)]
        >>> times = [cost.Sample(c, b, 1e-4 + c * (2e-6 + b / 1e9)) for c, b in cases]
        >>> fit = cost.fitted(cost.TABLE["pcie-4"], times, 2, 1e11, 1.0, "made up")
        >>> round(fit.link.alpha * 1e6, 3), round(fit.link.bytes_per_second)
        (1.0, 1000000000)
    """
    check_instance("known", known, Link, "a cost.Link", "Pass a row of cost.TABLE.")
    samples = as_list("samples", samples, *_SAMPLES, kind=Sample)
    num_devices = as_integer("num_devices", num_devices, least=1, most=_MOST_DEVICES)
    check_positive("memory_bytes_per_second", memory_bytes_per_second)
    check_positive("scatter_gather", scatter_gather)
    check_instance("source", source, str, "a string", "Pass for instance source='measured'.")
    if len({s.num_bytes for s in samples}) < 2 or len({s.count for s in samples}) < 2:
        raise refuse(
            f"{len(samples)} samples of {len({s.num_bytes for s in samples})} size(s) and "
            f"{len({s.count for s in samples})} count(s).",
            "Latency and bandwidth are separated by two sizes and two counts or more.",
            "Pass samples of another size, and of another count.",
        )
    n = num_devices
    waits, moved = _count_per_array(known.medium, n)
    terms = np.array([[1.0, s.count * waits, s.count * s.num_bytes * moved] for s in samples])
    times = np.array([s.seconds for s in samples])
    # The fit minimises relative errors. With absolute errors, large arrays would hide the latency
    # of small ones.
    best = _solve_non_negative(terms / times[:, None], np.ones(len(times)))
    errors = np.abs(terms @ best - times) / times
    # If all sizes are too small to take time, the samples do not determine the bandwidth.
    per_second = 1 / best[2] if best[2] > 0 else known.bytes_per_second
    link = dataclasses.replace(
        known,
        alpha=float(best[1]),
        bytes_per_second=float(per_second),
        memory_bytes_per_second=memory_bytes_per_second,
        scatter_gather=scatter_gather,
        source=source,
        curve=None,  # the fitted numbers are those that a program reaches
    )
    return Fit(link, float(best[0]), float(np.median(errors)))


def _count_per_array(medium: Medium, n: int) -> tuple[float, float]:
    """Return how many latencies one array takes, and how many times its bytes are moved."""
    # These are the formulas of `_model`, so a fitted link predicts the samples that it was fitted
    # to.
    if medium is Medium.MEMORY:
        return n * n, n
    if medium is Medium.HOST:
        return n * n, 2 * (n - 1)
    return 2 * math.ceil(math.log2(n)), 2 * (n - 1) / n


def _solve_non_negative(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least squares solution with no coefficient below 0.

    Tries all subsets of the three terms. Otherwise noise could give negative latencies.
    """
    count = terms.shape[1]
    best, least = np.zeros(count), math.inf
    subsets = (s for k in range(1, count + 1) for s in itertools.combinations(range(count), k))
    for subset in subsets:
        found, *_ = np.linalg.lstsq(terms[:, subset], wanted, rcond=None)
        residue = float(np.sum((terms[:, subset] @ found - wanted) ** 2))
        if (found >= 0).all() and residue < least:
            least = residue
            best = np.zeros(count)
            best[list(subset)] = found
    return best
