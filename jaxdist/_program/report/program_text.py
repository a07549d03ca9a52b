"""The text of a program: inputs and results with their kinds, and the collectives of the step."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._program.arguments.compiler_options import format_options
from jaxdist._reports import name_cells


def text(program: Any) -> str:
    """Return the `repr` of a `Program`."""
    layout = program.layout
    where = (
        f"{layout.num_replicas} replica(s) x {layout.num_logical} logical device(s) on "
        f"{layout.platform}"
    )
    # Virtual replicas share devices, so the number of devices is not that of the replicas.
    if layout.num_virtual is not None:
        where = (
            f"{layout.num_virtual} virtual replica(s) on {layout.num_places} device(s) of "
            f"{layout.platform}"
        )
    lines = [
        f"Program {program.name} for {where}",
        *_section("inputs", program.inputs),
        *_section("results", program.results),
        "  collectives:",
        *(f"    {name_cells(repr(c))}" for c in program.traced_collectives),
    ]
    if not program.traced_collectives:
        lines.append("    none")
    if program.asked_options:
        lines += ["  compiler options:", f"    {format_options(program.asked_options)}"]
    if program.placed:
        lines += ["  placed:", *(f"    {p!r}" for p in program.placed)]
    return "\n".join(lines)


def describe_slots(
    names: Sequence[str], slots: Sequence[Any], uneven: Mapping[int, Sequence[tuple[int, ...]]]
) -> dict[str, str]:
    """Return the kind, dtype and shape of each slot by name; all shapes if replicas differ."""
    shapes = [
        ", ".join(str(list(x)) for x in uneven.get(i, [s.shape])) for i, s in enumerate(slots)
    ]
    rows = zip(names, slots, shapes, strict=True)
    return {name: f"{s.kind.value} {s.dtype}{shape}" for name, s, shape in rows}


def _section(title: str, rows: dict[str, str]) -> list[str]:
    shown = [f"    {name}: {what}" for name, what in list(rows.items())[:20]]
    more = len(rows) - len(shown)
    return [f"  {title}:", *shown, *([f"    and {more} more"] if more > 0 else [])]
