"""Computes the needs of a program on one device by the roles of its inputs, and its times."""

import collections
import dataclasses
import enum
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import hlo
from jaxdist._planning.expected import predict_compute, predict_expected
from jaxdist._program import (
    CompiledProgram,
    CompiledRow,
    InSlot,
    Program,
    Signature,
    find_carried_arguments,
)
from jaxdist._reports import Expected, Memory, Times, Traffic, sum_bytes
from jaxdist._values import Kind, is_optax_state
from jaxdist.cost import Chip
from jaxdist.errors import ArgumentError, DeviceError


class Role(enum.Enum):
    """The role of an input in training. The values are fields of `SlicePlan.memory`."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    OTHER = "other_state"
    BATCH = "batch"


def get_roles(signature: Signature) -> tuple[Role, ...]:
    """Return the role of each traced input, in order.

    The type of an NNX variable gives its role. Among other arguments, per-replica values are the
    batch, arrays in an optax state belong to the optimizer, and other floats are parameters.
    """
    graph = signature.graph
    found: list[Role] = []
    if graph is not None:
        found = [_get_variable_role(t, p) for t, p in zip(graph.types, graph.paths, strict=True)]
    # The inputs begin with the variables of the NNX objects; the arguments follow.
    of_optax = _find_optax_numbers(signature)
    for number, slot in enumerate(signature.inputs[len(found) :]):
        if slot.kind is Kind.PER_REPLICA:
            found.append(Role.BATCH)
        elif number in of_optax:
            found.append(Role.OPTIMIZER)
        else:
            is_float = jnp.issubdtype(slot.dtype, jnp.inexact)
            found.append(Role.PARAMETERS if is_float else Role.OTHER)
    return tuple(found)


def _get_variable_role(kind: type, path: tuple[Any, ...]) -> Role:
    if issubclass(kind, nnx.OptState) or "opt_state" in path:
        return Role.OPTIMIZER
    return Role.PARAMETERS if issubclass(kind, nnx.Param) else Role.OTHER


def _find_optax_numbers(signature: Signature) -> set[int]:
    """Return the numbers of the traced arguments that are inside a named tuple of optax."""
    slots = [s if isinstance(s, int) else -1 for s in signature.slots]
    whole = jax.tree.unflatten(signature.treedef, slots)
    states = [x for x in jax.tree.leaves(whole, is_leaf=is_optax_state) if is_optax_state(x)]
    return {number for number in jax.tree.leaves(states) if number >= 0}


_REFUSED = re.compile(r"\((?P<needs>[\d.]+)(?P<of>[KMGT]?)\) exceeds available HBM "
                      r"\((?P<there>[\d.]+)(?P<unit>[KMGT]?)\)")  # fmt: skip
_FRACTION_VARIABLE, _FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True)
class Needs:
    """Memory, work and traffic of one device, and the times that follow from them.

    Attributes:
        memory: Bytes, by use.
        flops: Floating-point operations.
        hbm_traffic: Bytes read from and written to HBM.
        traffic: Collectives.
        times: Predicted times.
        unknown_loops: Loops with an unknown number of iterations; one iteration is counted.
        kept_state: Bytes of old state that exist next to the new state, since it is not donated.
        unknown: Operations that run but are not counted.
        expected: The expected time.
        enlarged: For each kind, the runs of all-gathers and reduce-scatters that the compiler
            turned into all-reduces, and the additional bytes that one device sends for them.
    """

    memory: Memory
    flops: int | None = None
    hbm_traffic: int | None = None
    traffic: tuple[Traffic, ...] = ()
    times: Times | None = None
    unknown_loops: int = 0
    kept_state: int = 0
    unknown: tuple[str, ...] = ()
    expected: Expected | None = None
    enlarged: Mapping[str, tuple[int, float]] = dataclasses.field(default_factory=dict)


def compile_needs(program: Program, device: Chip) -> Needs:
    """Compile a program and return its needs. `device` describes one device.

    If the program does not fit into memory, the result says so; this is not an error.
    """
    return read_needs(program, device, compile_or_get_refusal(program))


def compile_or_get_refusal(program: Program) -> CompiledProgram | str:
    """Return the compiled program, or the message of the compiler if it does not fit."""
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        # Only the text has the status code: JAX has one exception class for all errors of XLA.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise _make_plan_error(program, "the compiler failed", error) from error
        return str(error)


def read_needs(program: Program, device: Chip, compiled: CompiledProgram | str) -> Needs:
    """Return the needs of a program from the result of `compile_or_get_refusal`."""
    held = _count_argument_bytes(program)
    if isinstance(compiled, str):
        return Needs(_read_refusal(compiled, held, device), kept_state=_count_kept_state(program))
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # JAX parses the program that libtpu wrote, and may be older than libtpu.
        raise _make_plan_error(program, "JAX cannot read what the compiler wrote", error) from error
    # Not JAX's `cost_analysis`: it counts a loop once, so a scan over layers would be one layer.
    done = hlo.work(text)
    rows = compiled.explain().compiled
    traffic = _group_traffic(rows, device)
    inner, outer = (sum_bytes(traffic, link, device) for link in device.links)
    times = Times(
        predict_compute(done, device),
        done.memory_bytes / device.hbm_bytes_per_second,
        inner / device.inner_bytes_per_second,
        outer / device.outer_bytes_per_second,
        sum(t.seconds for t in traffic),
        device.links,
    )
    unknown = done.unknown_loops + sum(row.times is None for row in rows)
    is_tpu = program.layout.platform == "tpu"
    memory = (_read_memory if is_tpu else _read_gpu_memory)(compiled, held, device)
    return Needs(
        memory,
        done.flops,
        done.memory_bytes,
        traffic,
        times,
        unknown,
        _count_kept_state(program),
        done.unknown,
        predict_expected(text, program.layout, device),
        _find_enlarged(rows),
    )


def _find_enlarged(rows: tuple[CompiledRow, ...]) -> dict[str, tuple[int, float]]:
    """Return the collectives that the compiler turned into all-reduces, by kind."""
    found: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row.enlarged:
            runs, more = found.get(row.enlarged, (0, 0.0))
            own = _count_runs(row)
            # An all-reduce sends each byte twice.
            found[row.enlarged] = runs + own, more + own * row.bytes_sent / 2
    return found


def _make_plan_error(program: Program, what: str, error: Exception) -> DeviceError:
    is_gpu = program.layout.platform == "gpu"
    device = getattr(program.layout.devices[0], "device_kind", program.layout.platform)
    compiler = "of JAX's CUDA plugin" if is_gpu else "of libtpu"
    newer = "JAX and its CUDA plugin together" if is_gpu else "pip install -U jax libtpu"
    other = "GPUs of another kind" if is_gpu else "a slice of another generation"
    return DeviceError(
        f"{program.name} cannot be planned for {device}: {what}. It reported: "
        f"{str(error).splitlines()[0]}\n\n"
        f"A plan is made by the compiler {compiler}, and is read by JAX {jax.__version__}.\n\n"
        f"Install newer versions, which may support it: {newer}. Or plan for {other}, or with "
        "other rules."
    )


def _count_argument_bytes(program: Program) -> dict[str, int]:
    """Return the bytes of the arguments on one device, by role."""
    held = dict.fromkeys((r.value for r in Role), 0)
    for role, slot in zip(get_roles(program.signature), program.signature.inputs, strict=True):
        held[role.value] += _count_device_bytes(slot)
    return held


def _count_kept_state(program: Program) -> int:
    """Return the bytes of state that the step replaces and that is not donated."""
    inputs = program.signature.inputs
    # Results that are the next arguments, such as `params` in `params = step(params)`. Variables
    # of NNX objects always are.
    source = find_carried_arguments(program.signature, program.traced, program.layout.num_replicas)
    state = {*range(program.traced.num_graph), *source.values()}
    return sum(_count_device_bytes(inputs[i]) for i in state if i not in program.donated)


def _count_device_bytes(slot: InSlot) -> int:
    shape = slot.sharding.shard_shape(slot.shape) if slot.shape else ()
    return math.prod(shape) * int(slot.dtype.itemsize)


def _read_memory(compiled: CompiledProgram, held: dict[str, int], device: Chip) -> Memory:
    analysis: Any = compiled.executable.memory_analysis()
    # A result that aliases a donated argument needs no memory of its own.
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    # TPU arrays are padded to tiles, so arguments take more bytes than their elements have.
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
        fits=True,  # the compiler refuses a program that does not fit
    )


def _read_gpu_memory(compiled: CompiledProgram, held: dict[str, int], device: Chip) -> Memory:
    # The GPU compiler refuses nothing. JAX allocates a fraction of the memory when it starts, and
    # libraries need the rest.
    available = int(device.hbm_bytes * read_memory_fraction())
    allocated = _read_memory(compiled, held, device)
    analysis: Any = compiled.executable.memory_analysis()
    # XLA's own peak counts the temporaries that are alive together. They are in one allocation,
    # which may be larger.
    peak = max(allocated.peak or 0, int(analysis.peak_memory_in_bytes))
    return dataclasses.replace(allocated, peak=peak, fits=peak <= available, available=available)


def read_memory_fraction(environ: Mapping[str, str] = os.environ) -> float:
    """Return the fraction of a GPU's memory that JAX allocates when it starts.

    Raises:
        ArgumentError: `XLA_PYTHON_CLIENT_MEM_FRACTION` is not a fraction.
    """
    given = environ.get(_FRACTION_VARIABLE, "")
    if not given:
        return _FRACTION
    try:
        fraction = float(given)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ArgumentError(
            f"{_FRACTION_VARIABLE} is {given!r}.\n\nIt is the part of the memory of a GPU that JAX "
            f"allocates: a number above 0 and up to 1.\n\nSet it for instance to {_FRACTION}, the "
            "default of JAX, or remove it."
        )
    return fraction


def _read_refusal(message: str, held: dict[str, int], device: Chip) -> Memory:
    """Return the memory of a program that does not fit, from the message of the compiler."""
    # Without a match, the numbers are None: libtpu may change its message.
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


def _group_traffic(rows: tuple[CompiledRow, ...], device: Chip) -> tuple[Traffic, ...]:
    """Return the collectives, grouped by link, kind, axes and group size.

    In a loop with an unknown number of iterations, a collective counts once.
    """
    by_kind = collections.defaultdict[tuple[Any, ...], list[CompiledRow]](list)
    for row in rows:
        link = device.links[row.level != "inside"]
        by_kind[link, row.kind, row.axes, row.group_size, row.num_groups].append(row)
    return tuple(
        Traffic(
            link=link,
            kind=kind,
            runs=sum(_count_runs(r) for r in of),
            num_bytes=sum(_count_runs(r) * r.num_bytes for r in of),
            bytes_sent=sum(_count_runs(r) * _get_sent(r) for r in of),
            devices=size,
            groups=groups,
            seconds=sum(_count_runs(r) * r.seconds for r in of),
            bytes_inside=sum(_count_runs(r) * r.sent_inside for r in of if r.level != "inside"),
            axes=axes,
        )
        for (link, kind, axes, size, groups), of in by_kind.items()
    )


def _get_sent(row: CompiledRow) -> float:
    """Return the bytes that a device sends over the link of a row."""
    return row.sent_inside if row.level == "inside" else row.sent_between


def _count_runs(row: CompiledRow) -> int:
    return row.count * (1 if row.times is None else row.times)
