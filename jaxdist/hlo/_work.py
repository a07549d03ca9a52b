"""What one device does in a compiled program: operations of matrix products, and memory traffic."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxdist.hlo import _text
from jaxdist.hlo._text import Instruction, Module
from jaxdist.hlo._trips import trips

Shape = tuple[int, ...]

# Instructions that move nothing themselves: names for what is there, or what others are made of.
_NAMES = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
        "conditional", "after-all", "partition-id", "replica-id", "domain", "opt-barrier",
    }
)  # fmt: skip
_DIMS = re.compile(r"\[([\d,<=]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# The memory space in a layout; 0 is HBM, which is not written.
_SPACE = re.compile(r"S\((\d+)\)")
_ARRAY = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^{}]*\})?")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in one run of a program.

    `flops` are the multiplications and additions of matrix products and convolutions,
    `memory_bytes` what is read from and written to its main memory. `unknown_loops` is how many
    loops decide while running; each counts as one turn.
    """

    flops: int
    memory_bytes: int
    unknown_loops: int = 0


def work(text: str) -> Work:
    """The work in optimized HLO text, loops included.

    XLA's own `cost_analysis` counts the body of a loop once. What a fusion keeps to itself, and
    what lies in a faster memory beside the main one (VMEM of a TPU), is no traffic; of an operand
    of which a fusion takes a slice, the slice is.

    Args:
        text: What `jax.stages.Compiled.as_text` gives.

    Example:
        >>> from jaxdist import hlo
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((4, 8)), jnp.ones((8, 2))).compile()
        >>> hlo.work(compiled.as_text()).flops
        128
    """
    return _Count(_text.read(text)).total()


class _Count:
    """Adds up computations, each of which is looked at once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Work] = {}
        self._fused: dict[str, int] = {}

    def total(self) -> Work:
        return self._computation(self._module.entry)

    def _computation(self, name: str) -> Work:
        if name not in self._known:
            self._known[name] = Work(0, 0)  # nothing calls itself
            within = self._module.computations.get(name, {})
            parts = [self._instruction(within, i) for i in within.values()]
            self._known[name] = _sum(parts)
        return self._known[name]

    def _instruction(self, within: dict[str, Instruction], i: Instruction) -> Work:
        if i.opcode == "while":
            called = dict(i.called)
            count = trips(self._module, within, i)
            turn = _sum([self._computation(n) for n in called.values()])
            turns = 1 if count is None else count
            unknown = turn.unknown_loops + (count is None)
            return Work(turn.flops * turns, turn.memory_bytes * turns, unknown)
        if i.opcode == "conditional":
            # One branch runs: the one with most work.
            branches = [self._computation(n) for _, n in i.called]
            return max(branches, key=lambda w: (w.flops, w.memory_bytes), default=Work(0, 0))
        if i.opcode == "call" or (i.opcode.startswith("async-start") and not _is_wire(i)):
            return _sum([self._computation(n) for _, n in i.called])
        if i.opcode in _NAMES or i.opcode.endswith(("-done", "-update")):
            return Work(0, 0)
        return Work(self._flops(within, i), self._traffic(within, i))

    def _flops(self, within: dict[str, Instruction], i: Instruction) -> int:
        if i.opcode == "convolution":
            return _convolution(within, i)
        if i.opcode == "dot":
            return _dot(within, i)
        if i.opcode != "fusion":
            return 0
        name = _fused(i)
        if name not in self._fused:
            inside = self._module.computations.get(name, {})
            self._fused[name] = sum(self._flops(inside, j) for j in inside.values())
        return self._fused[name]

    def _traffic(self, within: dict[str, Instruction], i: Instruction) -> int:
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * _in_memory(i.shape)
        if i.opcode == "dynamic-update-slice":
            return 2 * _in_memory(_shape(within, i.operands[1]))
        if i.opcode == "fusion":
            return self._of_fusion(within, i)
        if i.opcode == "slice-start":
            # ((operand), result, numbers that the runtime waits on); a part of what is in memory.
            result = _text.elements(i.shape)[1]
            return _text.num_bytes(result) + _in_memory(result)
        read = sum(_in_memory(_shape(within, o)) for o in dict.fromkeys(i.operands))
        if i.opcode in ("copy-start", "async-start", "send", "recv"):
            # (result, operand, numbers that the runtime waits on).
            return read + _in_memory(_text.elements(i.shape)[0])
        return read + _in_memory(i.shape)

    def _of_fusion(self, within: dict[str, Instruction], i: Instruction) -> int:
        inside = self._module.computations.get(_fused(i), {})
        total = self._written(inside, i)
        parameters = [j for j in inside.values() if j.opcode == "parameter"]
        numbered = {int(p.operands[0]): p.name for p in parameters if p.operands}
        for number, operand in enumerate(i.operands):
            whole = _in_memory(_shape(within, operand))
            if whole:
                total += min(whole, self._read(inside, numbered.get(number, "")))
        return total

    def _written(self, inside: dict[str, Instruction], i: Instruction) -> int:
        """The bytes of results; of one that is updated in place, those of the update."""
        total = _in_memory(i.shape)
        for j in inside.values():
            if j.opcode == "dynamic-update-slice" and _in_memory(j.shape) <= total:
                update = _text.num_bytes(_shape(inside, j.operands[1]))
                total -= max(0, _in_memory(j.shape) - update)
        return max(total, 0)

    def _read(self, inside: dict[str, Instruction], name: str) -> int:
        """The bytes of a parameter that are looked at; all where it is not only sliced."""
        whole = _text.num_bytes(inside[name].shape) if name in inside else 0
        total = 0
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += _elements(user.shape) * whole // max(1, _elements(inside[name].shape))
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # in place
            elif user.opcode == "bitcast":
                total += self._read(inside, user.name)
            elif user.opcode == "fusion":
                deeper = self._module.computations.get(_fused(user), {})
                places = [k for k, o in enumerate(user.operands) if o == name]
                names = [
                    p.name
                    for p in deeper.values()
                    if p.opcode == "parameter" and p.operands and int(p.operands[0]) in places
                ]
                total += sum(self._read(deeper, n) for n in names)
            else:
                return whole
        return min(total, whole)


def _is_wire(i: Instruction) -> bool:
    """Whether an asynchronous start is a copy, not a computation."""
    return not any(True for _ in i.called)


def _fused(i: Instruction) -> str:
    return next((name for how, name in i.called if how == "calls"), "")


def _sum(parts: Sequence[Work]) -> Work:
    return Work(
        sum(p.flops for p in parts),
        sum(p.memory_bytes for p in parts),
        sum(p.unknown_loops for p in parts),
    )


def _shape(within: dict[str, Instruction], name: str) -> str:
    return within[name].shape if name in within else ""


def _in_memory(shape: str) -> int:
    """The bytes of the arrays of a shape that lie in main memory."""
    total = 0
    for array in _ARRAY.findall(shape):
        space = _SPACE.search(array)
        if space is None or space[1] == "0":
            total += _text.num_bytes(array)
    return total


def _dims(shape: str) -> Shape:
    found = _DIMS.search(shape)
    return tuple(int(d.lstrip("<=")) for d in found[1].split(",") if d) if found else ()


def _elements(shape: str) -> int:
    return math.prod(_dims(shape))


def _dot(within: dict[str, Instruction], i: Instruction) -> int:
    lhs = _dims(_shape(within, i.operands[0]))
    contracted = _CONTRACTED.search(i.rest)
    sizes = [lhs[int(d)] for d in contracted[1].split(",") if d] if contracted and lhs else []
    return 2 * math.prod(_dims(i.shape)) * math.prod(sizes)


def _convolution(within: dict[str, Instruction], i: Instruction) -> int:
    """Twice the products, of which those with padding are none."""
    labels = _LABELS.search(i.rest)
    lhs, rhs = (_dims(_shape(within, o)) for o in i.operands[:2])
    out = _dims(i.shape)
    if labels is None or not lhs or not rhs:
        return 0
    of_lhs, of_rhs, of_out = labels[1], labels[2], labels[3]
    groups = {m[1]: int(m[2]) for m in _GROUPS.finditer(i.rest)}
    places = list(_windows(i))
    spatial = sorted(c for c in of_out if c.isdigit())
    products = rhs[of_rhs.index("i")] * out[of_out.index("f")]
    # XLA writes the number of output features for all groups, that of input features for one.
    products *= lhs[of_lhs.index("b")] // groups.get("batch", 1)
    for number, dim in enumerate(spatial):
        window = places[number] if number < len(places) else _Window()
        sizes = (lhs[of_lhs.index(dim)], rhs[of_rhs.index(dim)], out[of_out.index(dim)])
        products *= window.valid(*sizes)
    return 2 * products


@dataclasses.dataclass(frozen=True)
class _Window:
    """How a kernel moves along one dim."""

    stride: int = 1
    low: int = 0
    of_input: int = 1  # dilation
    of_kernel: int = 1

    def valid(self, size: int, kernel: int, out: int) -> int:
        """Pairs of a place of the result and one of the kernel that meet an element."""
        at = np.arange(out)[:, None] * self.stride + np.arange(kernel) * self.of_kernel - self.low
        inside = (at >= 0) & (at <= (size - 1) * self.of_input) & (at % self.of_input == 0)
        return int(inside.sum())


def _windows(i: Instruction) -> Iterator[_Window]:
    found = _WINDOW.search(i.rest)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    count = len(fields.get("size", "").split("x")) if fields.get("size") else 0
    for dim in range(count):

        def of(name: str, default: int, dim: int = dim) -> int:
            values = fields.get(name, "").split("x")
            return int(values[dim].split("_")[0]) if values != [""] else default

        yield _Window(of("stride", 1), of("pad", 0), of("lhs_dilate", 1), of("rhs_dilate", 1))
