"""What a program needs of one device, and how long it takes at least: the numbers of a plan."""

import collections
import dataclasses
import math
import re
from typing import Any

import jax

from jaxdist import hlo
from jaxdist._planning.leaf_roles import Role, get_roles
from jaxdist._program import CompiledProgram, CompiledRow, InSlot, Program, carried
from jaxdist.cost import Chip
from jaxdist.errors import DeviceError
from jaxdist.explain import Memory, Times, Traffic

_REFUSED = re.compile(r"\((?P<needs>[\d.]+)(?P<of>[KMGT]?)\) exceeds available HBM "
                      r"\((?P<there>[\d.]+)(?P<unit>[KMGT]?)\)")  # fmt: skip
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True)
class Needs:
    """Memory, work and traffic of one device, and the times that follow."""

    memory: Memory
    flops: int | None = None
    hbm_traffic: int | None = None
    traffic: tuple[Traffic, ...] = ()
    times: Times | None = None
    unknown_loops: int = 0
    kept_state: int = 0  # bytes of old state that stay beside the new one
    unknown: tuple[str, ...] = ()  # what runs and is not counted


def compile_needs(program: Program, device: Chip) -> Needs:
    """Compile a program and read its needs; `device` is what one device has.

    Where the compiler finds that it does not fit, that is part of the answer.
    """
    return read_needs(program, device, compile_or_get_refusal(program))


def compile_or_get_refusal(program: Program) -> CompiledProgram | str:
    """The compiled program, or what the compiler said where it does not fit."""
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise _make_plan_error(program, "the compiler failed", error) from error
        return str(error)


def read_needs(program: Program, device: Chip, compiled: CompiledProgram | str) -> Needs:
    """What a program needs of one device, from what the compiler made of it."""
    held = _count_argument_bytes(program)
    if isinstance(compiled, str):
        return Needs(_read_refusal(compiled, held, device), kept_state=_count_kept_state(program))
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # JAX has its own reader of what libtpu wrote, and may be older.
        raise _make_plan_error(program, "JAX cannot read what the compiler wrote", error) from error
    done = hlo.work(text)
    rows = compiled.explain().compiled
    traffic = _group_traffic(rows)
    sent = {link: sum(t.bytes_sent for t in traffic if t.link == link) for link in ("ICI", "DCN")}
    times = Times(
        done.flops / device.flops,
        done.memory_bytes / device.hbm_bytes_per_second,
        sent["ICI"] / device.ici_bytes_per_second,
        sent["DCN"] / device.dcn_bytes_per_second,
        sum(t.seconds for t in traffic),
    )
    unknown = done.unknown_loops + sum(row.times is None for row in rows)
    memory = _read_memory(compiled, held, device)
    return Needs(
        memory,
        done.flops,
        done.memory_bytes,
        traffic,
        times,
        unknown,
        _count_kept_state(program),
        done.unknown,
    )


def _make_plan_error(program: Program, what: str, error: Exception) -> DeviceError:
    device = getattr(program.layout.devices[0], "device_kind", program.layout.platform)
    return DeviceError(
        f"{program.name} cannot be planned for {device}: {what}. It said: "
        f"{str(error).splitlines()[0]}\n\n"
        f"A plan is made by the compiler of libtpu, and is read by JAX {jax.__version__}.\n\n"
        "Install newer versions, which may support it: pip install -U jax libtpu. Or plan for a "
        "slice of another generation, or with other rules."
    )


def _count_argument_bytes(program: Program) -> dict[str, int]:
    """Bytes of the arguments on one device, by role."""
    held = dict.fromkeys((r.value for r in Role), 0)
    for role, slot in zip(get_roles(program.signature), program.signature.inputs, strict=True):
        held[role.value] += _count_device_bytes(slot)
    return held


def _count_kept_state(program: Program) -> int:
    """Bytes of state that comes in, goes out as new, and is not donated."""
    inputs = program.signature.inputs
    source = carried(program.signature, program.traced, program.layout.num_replicas)
    state = {*range(program.traced.num_graph), *source.values()}
    return sum(_count_device_bytes(inputs[i]) for i in state if i not in program.donated)


def _count_device_bytes(slot: InSlot) -> int:
    shape = slot.sharding.shard_shape(slot.shape) if slot.shape else ()
    return math.prod(shape) * int(slot.dtype.itemsize)


def _read_memory(compiled: CompiledProgram, held: dict[str, int], device: Chip) -> Memory:
    analysis: Any = compiled.executable.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    padding = max(0, analysis.argument_size_in_bytes - sum(held.values()))
    program = analysis.generated_code_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    return Memory(
        **held,
        padding=padding,
        results=results,
        temporaries=temporaries,
        program=program,
        peak=analysis.argument_size_in_bytes + results + temporaries + program,
        capacity=device.hbm_bytes,
        fits=True,  # the compiler refuses a program that does not
    )


def _read_refusal(message: str, held: dict[str, int], device: Chip) -> Memory:
    """The memory of a program that does not fit, from what the compiler said."""
    found = _REFUSED.search(message)
    peak = int(float(found["needs"]) * _UNITS[found["of"]]) if found else None
    available = int(float(found["there"]) * _UNITS[found["unit"]]) if found else None
    return Memory(
        **held,
        padding=0,
        results=None,
        temporaries=None,
        program=0,
        peak=peak,
        capacity=device.hbm_bytes,
        fits=False,
        available=available,
    )


def _group_traffic(rows: tuple[CompiledRow, ...]) -> tuple[Traffic, ...]:
    """Collectives by link and kind; those in a loop that decides while running as one turn."""
    by_kind: dict[tuple[str, str, int, int], list[CompiledRow]] = collections.defaultdict(list)
    for row in rows:
        link = "ICI" if row.level == "inside" else "DCN"
        by_kind[link, row.kind, row.group_size, row.num_groups].append(row)
    return tuple(
        Traffic(
            link=link,
            kind=kind,
            runs=sum(_count_runs(r) for r in of),
            num_bytes=sum(_count_runs(r) * r.num_bytes for r in of),
            bytes_sent=sum(_count_runs(r) * r.bytes_sent for r in of),
            devices=size,
            groups=groups,
            seconds=sum(_count_runs(r) * r.seconds for r in of),
        )
        for (link, kind, size, groups), of in by_kind.items()
    )


def _count_runs(row: CompiledRow) -> int:
    return row.count * (1 if row.times is None else row.times)
