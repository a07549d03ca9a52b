"""The work of one device in a compiled program: matrix products, and memory traffic."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from jaxdist.hlo import _text
from jaxdist.hlo._kernels import count_kernel
from jaxdist.hlo._known import (
    PRODUCTS,
    Call,
    describe_line,
    find_call,
    find_target,
    name_if_uncounted,
)
from jaxdist.hlo._products import count_products, parse_dims
from jaxdist.hlo._text import Instruction, Module
from jaxdist.hlo._trips import count_trips

# Instructions without memory traffic: aliases of other results, and containers of computations.
_NAMES = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
        "conditional", "after-all", "partition-id", "replica-id", "domain", "opt-barrier",
    }
)  # fmt: skip
# The memory space in a layout. Space 0 is HBM, which the text leaves out.
_SPACE = re.compile(r"S\((\d+)\)")
_ROOM = re.compile(r"[su]8\[\d+\]")
_OF_LIBRARIES = (Call.PRODUCT, Call.CONVOLUTION)
_ARRAY = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^{}]*\})?")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in one run of a program.

    `flops` are the multiplications and additions of matrix products and convolutions.
    `memory_bytes` are the bytes read from and written to the device's main memory. `unknown_loops`
    is the number of loops whose count is not constant; each counts as one run. `unknown` names
    instructions that run and are not counted, because the text lacks their operations or this
    version does not know them: solvers, kernels of Pallas and Triton, fused attention, new
    instructions.
    """

    flops: int
    memory_bytes: int
    unknown_loops: int = 0
    unknown: tuple[str, ...] = ()


def work(text: str) -> Work:
    """Return the work in optimized HLO text, loops included.

    XLA's own `cost_analysis` counts the body of a loop once. Values inside a fusion, and arrays in
    a faster memory than the main one (VMEM of a TPU), are no traffic. If a fusion takes a slice of
    an operand, only the slice counts.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Example:
        >>> from jaxdist import hlo
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((4, 8)), jnp.ones((8, 2))).compile()
        >>> hlo.work(compiled.as_text()).flops
        128
    """
    return _Count(_text.read(text)).total()


def make_counter(module: Module) -> Callable[[dict[str, Instruction], Instruction], Work]:
    """Return a function of a computation and one of its instructions: the work of one run."""
    return _Count(module)._instruction


class _Count:
    """A sum over computations, each of which is read once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Work] = {}
        self._find_fused: dict[str, Work] = {}

    def total(self) -> Work:
        """Return the work of the entry computation, with the lines that were not read."""
        lines = tuple(map(describe_line, self._module.unread))
        return _sum([self._computation(self._module.entry), Work(0, 0, unknown=lines)])

    def _computation(self, name: str) -> Work:
        """Return the work of one run of a computation."""
        if name not in self._known:
            self._known[name] = Work(0, 0)  # ends the recursion, should a text call itself
            within = self._module.computations.get(name, {})
            parts = [self._instruction(within, _text.resolve_start(i)) for i in within.values()]
            self._known[name] = _sum(parts)
        return self._known[name]

    def _instruction(self, within: dict[str, Instruction], i: Instruction) -> Work:
        """Return the work of one instruction, with the computations that it runs."""
        if i.opcode == "while":
            count = count_trips(self._module, within, i)
            turn = _sum([self._computation(n) for n in dict(i.called).values()])
            turns = 1 if count is None else count
            loops = turn.unknown_loops + (count is None)
            return Work(turn.flops * turns, turn.memory_bytes * turns, loops, turn.unknown)
        if i.opcode == "conditional":
            # One branch runs. The one with most work gives an upper bound, and whatever is unknown
            # in the others is still reported.
            branches = [self._computation(n) for _, n in i.called]
            most = max(branches, key=lambda w: (w.flops, w.memory_bytes), default=Work(0, 0))
            return dataclasses.replace(most, unknown=_sum(branches).unknown)
        if i.opcode == "call" or (i.opcode.startswith("async-start") and not _is_copy(i)):
            return _sum([self._computation(n) for _, n in i.called])
        if i.opcode in _NAMES or i.opcode.endswith(("-done", "-update")):
            return Work(0, 0)
        if i.opcode == "custom-call" and find_call(i) is Call.NAME:
            return Work(0, 0)
        done = self._count_products(within, i)
        return dataclasses.replace(done, memory_bytes=self._count_traffic(within, i))

    def _count_products(self, within: dict[str, Instruction], i: Instruction) -> Work:
        """Return the matrix products of an instruction, and its unknown operations; no traffic."""
        if i.opcode == "fusion":
            name = _find_fused(i)
            if name not in self._find_fused:
                inside = self._module.computations.get(name, {})
                self._find_fused[name] = _sum(
                    [self._count_products(inside, j) for j in inside.values()]
                )
            return self._find_fused[name]
        if i.opcode in PRODUCTS or (i.opcode == "custom-call" and find_call(i) in _OF_LIBRARIES):
            count = count_products(within, i)
            return Work(count, 0) if count is not None else Work(0, 0, unknown=(_name_call(i),))
        kernel = count_kernel(within, i)
        if kernel is not None:
            return Work(kernel, 0)
        name = name_if_uncounted(i)
        return Work(0, 0, unknown=(name,) if name else ())

    def _count_traffic(self, within: dict[str, Instruction], i: Instruction) -> int:
        """Return the bytes that an instruction reads from and writes to main memory."""
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            # These read as many bytes as they write, and not the whole operand.
            is_there = bool(_count_bytes(_find_shape(within, i.operands[0])))
            return _count_bytes(i.shape) + (_text.num_bytes(i.shape) if is_there else 0)
        if i.opcode == "dynamic-update-slice":
            # XLA updates the array in place: it reads the update and writes it.
            return 2 * _count_bytes(_find_shape(within, i.operands[1]))
        if i.opcode == "fusion":
            return self._count_fusion(within, i)
        # An operand that is used twice is read once.
        read = sum(_count_bytes(_find_shape(within, o)) for o in dict.fromkeys(i.operands))
        if i.opcode in ("copy-start", "async-start", "send", "recv"):
            # The shape is (result, operand, numbers that the runtime waits on).
            return read + _count_bytes(_text.elements(i.shape)[0])
        return read + sum(_count_bytes(shape) for shape in _list_result_shapes(i))

    def _count_fusion(self, within: dict[str, Instruction], i: Instruction) -> int:
        """Return the bytes that a fusion reads and writes."""
        inside = self._module.computations.get(_find_fused(i), {})
        total = self._count_written(inside, i)
        parameters = [j for j in inside.values() if j.opcode == "parameter"]
        numbered = {int(p.operands[0]): p.name for p in parameters if p.operands}
        for number, operand in enumerate(i.operands):
            whole = _count_bytes(_find_shape(within, operand))
            if whole:
                # The operand may be in fast memory, which counts 0 as `whole`.
                total += min(whole, self._count_read(inside, numbered.get(number, "")))
        return total

    def _count_written(self, inside: dict[str, Instruction], i: Instruction) -> int:
        """Return the bytes of the results; for a result that is updated in place, of the update."""
        total = _count_bytes(i.shape)
        for j in inside.values():
            if j.opcode == "dynamic-update-slice" and _count_bytes(j.shape) <= total:
                update = _text.num_bytes(_find_shape(inside, j.operands[1]))
                total -= max(0, _count_bytes(j.shape) - update)
        return max(total, 0)

    def _count_read(self, inside: dict[str, Instruction], name: str) -> int:
        """Return the bytes of a parameter that are read: all, unless it is only sliced."""
        whole = _text.num_bytes(inside[name].shape) if name in inside else 0
        total = 0
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                all_elements = max(1, math.prod(parse_dims(inside[name].shape)))
                total += math.prod(parse_dims(user.shape)) * whole // all_elements
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # in place
            elif user.opcode == "bitcast":
                # A bitcast is the same memory under another shape.
                total += self._count_read(inside, user.name)
            elif user.opcode == "fusion":
                deeper = self._module.computations.get(_find_fused(user), {})
                places = [k for k, o in enumerate(user.operands) if o == name]
                names = [
                    p.name
                    for p in deeper.values()
                    if p.opcode == "parameter" and p.operands and int(p.operands[0]) in places
                ]
                total += sum(self._count_read(deeper, n) for n in names)
            else:
                return whole
        return min(total, whole)


def _is_copy(i: Instruction) -> bool:
    """Whether an asynchronous start is a copy, not a computation."""
    return not any(True for _ in i.called)


def _find_fused(i: Instruction) -> str:
    """Return the name of the computation of a fusion."""
    return next((name for how, name in i.called if how == "calls"), "")


def _sum(parts: Sequence[Work]) -> Work:
    """Return the sum of several works."""
    return Work(
        sum(p.flops for p in parts),
        sum(p.memory_bytes for p in parts),
        sum(p.unknown_loops for p in parts),
        tuple(dict.fromkeys(name for p in parts for name in p.unknown)),
    )


def _name_call(i: Instruction) -> str:
    """Return the name of an instruction in reports."""
    return f"custom-call to {find_target(i)}" if i.opcode == "custom-call" else i.opcode


def _list_result_shapes(i: Instruction) -> list[str]:
    """Return the shapes of the results, without the workspace of a library.

    The workspace comes last, as an array of bytes.
    """
    shapes = _text.elements(i.shape)
    is_library = i.opcode == "custom-call" and find_target(i).startswith("__cu")
    if is_library and len(shapes) > 1 and _ROOM.match(shapes[-1]):
        return shapes[:-1]
    return shapes


def _find_shape(within: dict[str, Instruction], name: str) -> str:
    """Return the shape of an operand, or "" if the text lacks it."""
    return within[name].shape if name in within else ""


def _count_bytes(shape: str) -> int:
    """Return the bytes of the arrays of a shape that are in main memory."""
    total = 0
    for array in _ARRAY.findall(shape):
        space = _SPACE.search(array)
        if space is None or space[1] == "0":
            total += _text.num_bytes(array)
    return total
