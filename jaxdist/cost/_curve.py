"""Describes how the time of a collective of NCCL depends on its size, with a few numbers per link.

# Note [Size curve]
NCCL cuts an array into pieces, and each piece passes through all GPUs of a group in turn. So the
time of a collective is a latency for each step of its algorithm, plus its bytes at a part of the
link's bandwidth. Three things make it faster: NVLink switches that compute the sums of an
all-reduce, trees, and a protocol for few bytes. `SizeCurve` holds the numbers of one link, and
`_nccl` has the formulas.
"""

import dataclasses
import math
import numbers
from typing import Any

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, check_instance, show

# Examples of times and factors. Every other argument is a number of bytes per second.
_EXAMPLES = {
    "alpha": "1e-6",
    "seconds": "1e-4",
    "scatter_gather": "1.0",
    "step_seconds": "5e-6",
    "small_step_seconds": "1e-6",
    "part": "0.8",
    "switch_part": "1.0",
}


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuse a value that is not a finite number above 0 (with `or_zero`, of 0 or more)."""
    rule = f"{name} is a finite number {'from 0 up' if or_zero else 'above 0'}."
    found = f"{name}={show(value)}."
    remedy = f"Pass for instance {name}={_EXAMPLES.get(name, '1e9')}."
    # A bool is a number in Python, but never meant as one here.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse_type(found, rule, remedy)
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise refuse(found, rule, remedy)


# The protocol for few bytes (LL) stores a flag of 4 bytes with every 4 bytes of data.
SMALL_PART = 0.5


@dataclasses.dataclass(frozen=True)
class SizeCurve:
    """The latency of a step of NCCL over a link, and the parts of its bandwidth that it reaches.

    See Note [Size curve].

    Args:
        step_seconds: The time of a step without bytes, when NCCL uses the full bandwidth.
        part: The part of the bandwidth that collectives reach for many bytes.
        source: The source of the numbers.
        switch_part: The part that an all-reduce reaches inside an NVLink domain. It is above
            `part`, and may be above 1, if the switches compute the sums. None means `part`.
        small_step_seconds: The time of a step in the protocol for few bytes, which reaches half of
            the bandwidth. None means that the protocol is not used.
        chain: The number of GPUs that a tree joins in a chain, such as those of one host.

    Example:
        >>> from jaxdist import cost
        >>> curve = cost.TABLE["nvlink-4"].curve
        >>> round(curve.part, 2), curve.switch_part
        (0.82, 1.07)
    """

    step_seconds: float
    part: float
    source: str
    switch_part: float | None = None
    small_step_seconds: float | None = None
    chain: int = 1

    @called("cost.SizeCurve")
    def __post_init__(self) -> None:
        for name in ("step_seconds", "part"):
            check_positive(name, getattr(self, name))
        for name in ("switch_part", "small_step_seconds"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        as_integer("chain", self.chain, least=1)
        remedy = "Pass for instance source='measured'."
        check_instance("source", self.source, str, "a string", remedy)

    @property
    def all_reduce_part(self) -> float:
        """The part of the bandwidth that an all-reduce inside an NVLink domain reaches."""
        return self.part if self.switch_part is None else self.switch_part


# For all GPUs, fitted only to the published all-reduces of 8 H200 in one host: the part that an
# all-reduce with switches reaches, from 16 GiB; the mean latency of a step at 16, 64 and 256 MiB;
# the latency of a step at 1 MiB. tests/cost/test_nccl.py repeats the fit.
_SWITCH_PART, _STEP_SECONDS, _SMALL_STEP_SECONDS = 1.07, 5.2e-6, 1.2e-6
_FITTED = "fitted on 8 H200, https://github.com/stas00/ml-engineering network/benchmarks"
_GPUS_OF_A_HOST = 8

_NCCL = "https://github.com/NVIDIA/nccl"
_RING_OF_H100 = 370 / 450  # GB/s
_RING_OF_A100 = 235 / 300
_H100 = f"370 of 450 GB/s on H100 without sums in the switch, {_NCCL}/issues/1455"
_A100 = f"235 of 300 GB/s on A100, {_NCCL} src/graph/tuning.cc"


def _make_nvlink_curve(part: float, source: str, switch_part: float | None = None) -> SizeCurve:
    return SizeCurve(
        _STEP_SECONDS,
        part,
        f"part: {source}; steps: {_FITTED}",
        switch_part,
        _SMALL_STEP_SECONDS,
        _GPUS_OF_A_HOST,
    )


_WITH_SWITCH = _make_nvlink_curve(_RING_OF_H100, f"{_H100}; switch: {_FITTED}", _SWITCH_PART)
_NETWORK = SizeCurve(
    9.6e-6,
    0.94,
    f"part: 46 to 48 of 50 GB/s a card, {_NCCL}-tests/issues/290; "
    f"step: {_NCCL} src/graph/tuning.cc",
)

# The curve of each link of GPUs, by the name of its row in the table of links.
CURVES: dict[str, SizeCurve] = {
    "nvlink-1": _make_nvlink_curve(_RING_OF_H100, f"assumed as on H100: {_H100}"),
    "nvlink-2": _make_nvlink_curve(_RING_OF_H100, f"assumed as on H100: {_H100}"),
    "nvlink-3": _make_nvlink_curve(_RING_OF_A100, _A100),
    "nvlink-4": _WITH_SWITCH,
    "nvlink-5": _WITH_SWITCH,
    "infiniband-edr": _NETWORK,
    "infiniband-hdr": _NETWORK,
    "infiniband-ndr": _NETWORK,
    "infiniband-xdr": _NETWORK,
}
