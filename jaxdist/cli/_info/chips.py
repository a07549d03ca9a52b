"""`jaxdist chips`: prints the table of chips, TPUs and GPUs, with the source of each row."""

import sys
from collections.abc import Iterator

from rich.console import Console

from jaxdist._reports import Table, as_text, find_screen_width
from jaxdist.cost import CHIPS, Chip

_COLUMNS = ("chip", "bf16", "fp8", "float32", "memory", "HBM", "fast links", "network", "group")
_UNITS = (
    "bf16, fp8, float32: TFLOP/s of dense products",
    "float32 is as XLA computes it by default: in TF32 on GPUs, in bfloat16 on TPUs",
    "memory: GiB; HBM: GB/s",
    "fast links, network: GB/s that a chip sends over all its ICI or NVLink, and over the network",
    "group: the chips of the largest slice, or NVLink domain",
)


def show_chips() -> int:
    """Print the peaks of all chips, and their published sources.

    Cost:
        None: this does not start JAX's backend.
    """
    rows = tuple(_describe(chip) for chip in CHIPS.values())
    table = Table("Published peaks of a chip", _COLUMNS, rows, frozenset(_COLUMNS[1:]))
    parts = [table, *(f"  {line}" for line in _UNITS), "Sources", *_list_sources()]
    text = as_text(parts, find_screen_width())
    Console(file=sys.stdout).print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _describe(chip: Chip) -> tuple[str, ...]:
    """Return the cells of one row."""
    return (
        chip.name,
        f"{chip.flops / 1e12:,.5g}",
        "-" if chip.fp8_flops is None else f"{chip.fp8_flops / 1e12:,.5g}",
        f"{chip.flops_of('f32') / 1e12:,.5g}",
        f"{chip.hbm_bytes / 2**30:.4g}",
        f"{chip.hbm_bytes_per_second / 1e9:,.0f}",
        f"{chip.inner_bytes_per_second / 1e9:,.4g}",
        f"{chip.outer_bytes_per_second / 1e9:,.4g}",
        f"{chip.pod_chips:,}",
    )


def _list_sources() -> Iterator[str]:
    for chip in CHIPS.values():
        inner, outer = chip.links
        yield f"  {chip.name}: {chip.source}"
        yield f"    {inner}: {chip.inner_source}"
        yield f"    {outer}: {chip.outer_source}"
