"""The published peaks of TPU chips and GPUs: one table, with sources.

All figures are for one chip. If a source gives the sum of both directions of a link, the table has
half of it: `inner_bytes_per_second` and `outer_bytes_per_second` are the bytes that leave a chip.
"""

import dataclasses
import math
from typing import Any

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, as_list, check_instance, check_text, show
from jaxdist.cost._gpu_rows import GPU_ROWS, GpuRow, Target

_GIB = 1 << 30
_DOCS = "https://docs.cloud.google.com/tpu/docs"
_CACM = "Jouppi et al., A domain-specific supercomputer, https://doi.org/10.1145/3360307"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
_ONE_CARD = "assumed: one 100 Gbit/s card for 8 cores"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published peaks of one chip, a TPU or a GPU.

    Args:
        name: The generation.
        flops: Operations of bfloat16 matrix products per second.
        hbm_bytes: Bytes of memory; for a GPU, those that its driver reports.
        hbm_bytes_per_second: Bytes per second that the chip reads from memory or writes to it.
        inner_bytes_per_second: Bytes per second that it sends over all its fast links: ICI inside
            a slice, NVLink inside a domain.
        outer_bytes_per_second: Bytes per second that it sends over the network between slices or
            domains.
        devices: The number of devices that JAX has for one chip on a TPU VM; 1 for a GPU.
        pod: The chips of the largest slice in x, y and z; for a GPU, the hosts of the largest
            NVLink domain and the GPUs of a host.
        source: The source of the numbers.
        inner_source: The source of the bandwidth inside a slice or domain.
        outer_source: The source of the bandwidth between slices or domains.
        platform: `"tpu"` or `"gpu"`.
        fp8_flops: Operations of products of 8-bit floats per second; None if it has none.
        tf32_flops: Operations of float32 products per second, as XLA compiles them if no precision
            is requested: in TF32 on GPUs. None if they run in bfloat16.
        target: The description of a GPU for XLA's compiler; None for a TPU, which libtpu knows.

    Example:
        >>> from jaxdist import cost
        >>> chip = cost.CHIPS["v5e"]
        >>> chip.flops / 1e12, chip.hbm_bytes >> 30
        (197.0, 16)
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    inner_bytes_per_second: float
    outer_bytes_per_second: float
    devices: int
    pod: tuple[int, ...]
    source: str
    inner_source: str
    outer_source: str
    platform: str = "tpu"
    fp8_flops: float | None = None
    tf32_flops: float | None = None
    target: Target | None = None

    @property
    def links(self) -> tuple[str, str]:
        """The names of the links inside a slice or NVLink domain, and between them.

        Example:
            >>> from jaxdist import cost
            >>> cost.CHIPS["v5e"].links, cost.CHIPS["h100"].links
            (('ICI', 'DCN'), ('NVLink', 'network'))
        """
        return ("NVLink", "network") if self.platform == "gpu" else ("ICI", "DCN")

    @property
    def pod_chips(self) -> int:
        """The number of chips of the largest slice or NVLink domain.

        Example:
            >>> from jaxdist import cost
            >>> cost.CHIPS["v5p"].pod, cost.CHIPS["v5p"].pod_chips
            ((16, 16, 24), 6144)
        """
        return math.prod(self.pod)

    @called("Chip.flops_of")
    def flops_of(self, dtype: str) -> float:
        """Return the peak of matrix products of a dtype, named as in HLO or as in NumPy.

        Products of 8-bit floats have the peak of bfloat16 on chips without 8-bit products.

        Example:
            >>> from jaxdist import cost
            >>> h100 = cost.CHIPS["h100"]
            >>> [h100.flops_of(dtype) / 1e12 for dtype in ("bf16", "f8e4m3fn", "f32")]
            [989.0, 1979.0, 494.5]
        """
        check_text("dtype", dtype, "bf16")
        if dtype.startswith(("f8", "float8")) and self.fp8_flops is not None:
            return self.fp8_flops
        if dtype in ("f32", "float32") and self.tf32_flops is not None:
            return self.tf32_flops
        return self.flops

    @called("Chip.per_device")
    def per_device(self, devices: int) -> "Chip":
        """Return the peaks of one device if `devices` devices share the chip.

        Example:
            >>> from jaxdist import cost
            >>> cost.CHIPS["v4"].per_device(2).flops / 1e12
            137.5
        """
        devices = as_integer("devices", devices, least=1)
        rates = {name: getattr(self, name) for name in (*_FLOPS, *_BANDWIDTHS)}
        shares = {name: rate / devices for name, rate in rates.items() if rate is not None}
        return dataclasses.replace(self, **shares, hbm_bytes=self.hbm_bytes // devices, devices=1)


# What the devices of a chip share, per second.
_FLOPS = ("flops", "fp8_flops", "tf32_flops")
_BANDWIDTHS = ("hbm_bytes_per_second", "inner_bytes_per_second", "outer_bytes_per_second")


# Peaks of each TPU: FLOP/s, bytes of memory, bytes/s of memory, of ICI and of DCN, devices, pod.
_PEAKS: dict[str, tuple[float, int, float, float, float, int, tuple[int, ...]]] = {
    "v2": (46e12, 16 * _GIB, 700e9, 248e9, 3.125e9, 2, (16, 16)),
    "v3": (123e12, 32 * _GIB, 900e9, 328e9, 3.125e9, 2, (32, 32)),
    "v4": (275e12, 32 * _GIB, 1200e9, 270e9, 6.25e9, 1, (16, 16, 16)),
    "v5e": (197e12, 16 * _GIB, 819e9, 200e9, 3.125e9, 1, (16, 16)),
    "v5p": (459e12, 95 * _GIB, 2765e9, 600e9, 6.25e9, 1, (16, 16, 24)),
    "v6e": (918e12, 32 * _GIB, 1638e9, 400e9, 12.5e9, 1, (16, 16)),
    "7x": (2307e12, 192 * _GIB, 7380e9, 600e9, 12.5e9, 2, (16, 24, 24)),
}
# Sources of the peaks: of all but the two networks, of ICI, of DCN.
_SOURCES = {
    "v2": (_CACM, f"4 x 496 Gbit/s a chip, {_CACM}", _ONE_CARD),
    "v3": (f"{_DOCS}/v3", f"4 x 656 Gbit/s a chip, {_CACM}", _ONE_CARD),
    "v4": (
        f"{_DOCS}/v4",
        f"6 x 45 GB/s a chip, {_BOOK}; memory {_DOCS}/v4",
        f"50 Gbit/s a chip, {_BOOK}",
    ),
    "v5e": (
        f"{_DOCS}/v5e",
        f"400 GB/s a chip in both directions, {_DOCS}/v5e",
        f"25 Gbit/s a chip: 6.4 Tbit/s for 256, {_DOCS}/v5e",
    ),
    "v5p": (
        f"{_DOCS}/v5p",
        f"1200 GB/s a chip in both directions, {_DOCS}/v5p",
        f"50 Gbit/s a chip, {_DOCS}/v5p",
    ),
    "v6e": (
        f"{_DOCS}/v6e",
        f"800 GB/s a chip in both directions, {_DOCS}/tpu7x",
        f"100 Gbit/s a chip, {_DOCS}/tpu7x",
    ),
    "7x": (
        f"{_DOCS}/tpu7x",
        f"1200 GB/s a chip in both directions, {_DOCS}/tpu7x",
        f"100 Gbit/s a chip, {_DOCS}/tpu7x",
    ),
}


def _make_gpu(name: str, row: GpuRow) -> Chip:
    """Return the chip of a row of GPUs. On all of them, TF32 has half the peak of bfloat16."""
    bf16, fp8, nvlink, network, domain, target, sources = row
    memory = target.memory_bytes, target.memory_bytes_per_second
    of_gpu = "gpu", fp8, bf16 / 2, target
    return Chip(name, bf16, *memory, nvlink, network, 1, domain, *sources, *of_gpu)


CHIPS: dict[str, Chip] = {
    **{name: Chip(name, *peaks, *_SOURCES[name]) for name, peaks in _PEAKS.items()},
    **{name: _make_gpu(name, row) for name, row in GPU_ROWS.items()},
}

# Words in a device kind, and the generation. The first match counts, so "v5 lite" comes before
# "v5", which on its own is a v5p.
_KINDS = (
    ("v2", "v2"),
    ("v3", "v3"),
    ("v4", "v4"),
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v6", "v6e"),
    ("7x", "7x"),
    # Only GPUs with NVLink to a switch: a GH200 and the PCIe variants have other peaks.
    ("a100-sxm4-40gb", "a100-40"),
    ("a100-sxm4-80gb", "a100"),
    ("h100 80gb hbm3", "h100"),
    ("nvidia h200", "h200"),
    ("nvidia b200", "b200"),
    ("nvidia gb200", "gb200"),
)


@called("cost.generation_of")
def generation_of(kind: str) -> str | None:
    """Return the name of the table's row for a `device_kind` of JAX, or None.

    Example:
        >>> from jaxdist import cost
        >>> cost.generation_of("TPU v5 lite"), cost.generation_of("cpu")
        ('v5e', None)
    """
    check_instance("kind", kind, str, "a device_kind of JAX", "Pass device.device_kind.")
    lower = kind.lower()
    return next((name for words, name in _KINDS if words in lower), None)


@called("cost.chip_of")
def chip_of(device: Any) -> Chip:
    """Return the chip of a TPU device or a GPU.

    Raises:
        ArgumentError: The device is neither a TPU nor a GPU, or the table lacks its chip.

    Example:
        >>> from jaxdist import cost
        >>> cost.chip_of(jax.devices("cpu")[0])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        jaxdist.errors.ArgumentError: cost.chip_of was given device=cpu:0, of the kind 'cpu'.
        <BLANKLINE>
        The table of chips has v2, v3, v4, v5e, v5p, v6e, 7x, a100-40, a100, ...
        <BLANKLINE>
        Pass a device of a TPU or a GPU of the table.
    """
    kind = str(getattr(device, "device_kind", device))
    # A `device_kind` that is passed as a string has no platform.
    name = generation_of(kind)
    if name is None or getattr(device, "platform", CHIPS[name].platform) != CHIPS[name].platform:
        raise refuse(
            f"device={device}, of the kind {kind!r}.",
            f"The table of chips has {', '.join(CHIPS)}.",
            "Pass a device of a TPU or a GPU of the table.",
        )
    return CHIPS[name]


@called("cost.devices_per_chip")
def devices_per_chip(devices: Any) -> int:
    """Return how many of these TPU devices share a chip; libtpu describes a v4 chip as two.

    Example:
        >>> from jaxdist import cost
        >>> cost.devices_per_chip(jaxdist.tpu.slice_of("v4:2x2x1").cores)
        2
    """
    what, remedy = "a list of TPU devices", "Pass for instance jax.devices('tpu')."
    listed = as_list("devices", devices, what, remedy)
    for device in listed:
        if not hasattr(device, "process_index"):
            raise refuse_type(f"devices with {show(device)}.", f"devices is {what}.", remedy)
    return max((int(getattr(d, "core_on_chip", 0) or 0) for d in listed), default=0) + 1
