"""Counts the work of one device in a compiled program: matrix products and memory traffic."""

import collections
import dataclasses
import fractions
from collections.abc import Sequence

from jaxdist.hlo import _text
from jaxdist.hlo._known import (
    PRODUCTS,
    Call,
    describe_computation,
    describe_line,
    find_call,
    find_target,
    name_if_uncounted,
    runs_on_other_core,
)
from jaxdist.hlo._products import (
    count_kernel,
    count_products,
    find_kernel_dtype,
    find_product_dtype,
)
from jaxdist.hlo._text import Instruction, Module, find_part
from jaxdist.hlo._traffic import count_traffic, find_fused
from jaxdist.hlo._trips import count_trips

# Instructions without memory traffic: aliases of other results, and containers of computations.
_NAMES = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
        "conditional", "after-all", "partition-id", "replica-id", "domain", "opt-barrier",
    }
)  # fmt: skip
_OF_LIBRARIES = (Call.PRODUCT, Call.SCALED, Call.CONVOLUTION, Call.ATTENTION)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in one run of a program.

    `flops` are the multiplications and additions of matrix products and convolutions.
    `memory_bytes` are the bytes read from and written to the device's main memory. `unknown_loops`
    is the number of loops whose count is not constant; each counts as one run. `unknown` names
    instructions that run and are not counted, because the text lacks their operations or this
    version does not know them: solvers, kernels of Pallas and Triton without an estimate, fused
    attention, new instructions. `flops_by_dtype` is `flops` by the dtype of the operands that are
    multiplied: pairs of its name in HLO (`"bf16"`, `"f32"`, `"f8e4m3fn"`, `"f8e5m2"`, `"s8"`) and a
    number, sorted by name. Of two dtypes, the wider one counts, as a device multiplies in it.
    """

    flops: int
    memory_bytes: int
    unknown_loops: int = 0
    unknown: tuple[str, ...] = ()
    flops_by_dtype: tuple[tuple[str, int], ...] = ()


def work(text: str) -> Work:
    """Return the work in optimized HLO text, loops included.

    XLA's own `cost_analysis` counts the body of a loop once. Values inside a fusion, and arrays in
    a memory faster than the main one (VMEM of a TPU), do not count as traffic. If a fusion takes a
    slice of an operand, only the slice counts.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Example:
        >>> from jaxdist import hlo
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((4, 8)), jnp.ones((8, 2))).compile()
        >>> hlo.work(compiled.as_text()).flops
        128
        >>> hlo.work(compiled.as_text()).flops_by_dtype
        (('f32', 128),)
    """
    return Counter(_text.read(text)).total()


class Counter:
    """A sum over computations, which are read once each."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Work] = {}
        self._fused: dict[str, Work] = {}

    def total(self) -> Work:
        """Return the work of the entry computation, with the lines that were not read."""
        lines = tuple(map(describe_line, self._module.unread))
        return _sum([self._computation(self._module.entry), Work(0, 0, unknown=lines)])

    def _computation(self, name: str) -> Work:
        """Return the work of one run of a computation."""
        if name not in self._known:
            self._known[name] = Work(0, 0)  # ends the recursion if a computation calls itself
            within = self._module.computations.get(name, {})
            parts = [self.instruction(within, _text.resolve_start(i)) for i in within.values()]
            self._known[name] = _sum([*parts, self._name_if_missing(name)])
        return self._known[name]

    def _name_if_missing(self, name: str) -> Work:
        """Return no work, and the name of a computation that the text lacks."""
        is_there = name in self._module.computations
        return Work(0, 0, unknown=() if is_there else (describe_computation(name),))

    def instruction(self, within: dict[str, Instruction], i: Instruction) -> Work:
        """Return the work of one instruction, with the computations that it runs."""
        if i.opcode == "while":
            count = count_trips(self._module, within, i)
            turn = _sum([self._computation(n) for n in dict(i.called).values()])
            turns = 1 if count is None else count
            loops = turn.unknown_loops + (count is None)
            return dataclasses.replace(_repeat(turn, turns), unknown_loops=loops)
        if i.opcode == "conditional":
            # One branch runs. The one with the most work gives an upper bound, unless a part of
            # the iterations is noted. Unknown instructions of the others are still reported.
            branches = [self._computation(n) for _, n in i.called]
            most = max(branches, key=lambda w: (w.flops, w.memory_bytes), default=Work(0, 0))
            return dataclasses.replace(_repeat(most, find_part(i)), unknown=_sum(branches).unknown)
        # An asynchronous start without a computation is a copy.
        is_async = i.opcode.startswith("async-start") and any(i.called)
        if i.opcode == "call" or is_async or runs_on_other_core(i):
            return _sum([self._computation(n) for _, n in i.called])
        if i.opcode in _NAMES or i.opcode.endswith(("-done", "-update")):
            return Work(0, 0)
        if i.opcode == "custom-call" and find_call(i) is Call.NAME:
            return Work(0, 0)
        done = self._count_products(within, i)
        return dataclasses.replace(done, memory_bytes=count_traffic(self._module, within, i))

    def _count_products(self, within: dict[str, Instruction], i: Instruction) -> Work:
        """Return the matrix products of an instruction, and its unknown operations; no traffic."""
        if i.opcode == "fusion":
            name = find_fused(i)
            if name not in self._fused:
                inside = self._module.computations.get(name, {})
                parts = [self._count_products(inside, j) for j in inside.values()]
                self._fused[name] = _sum([*parts, self._name_if_missing(name)])
            return self._fused[name]
        if i.opcode in PRODUCTS or (i.opcode == "custom-call" and find_call(i) in _OF_LIBRARIES):
            count = count_products(within, i)
            if count is None:
                is_call = i.opcode == "custom-call"
                name = f"custom-call to {find_target(i)}" if is_call else i.opcode
                return Work(0, 0, unknown=(name,))
            return _make_work(count, find_product_dtype(within, i))
        kernel = count_kernel(within, i)
        if kernel is not None:
            return _make_work(kernel, find_kernel_dtype(within, i))
        name = name_if_uncounted(i)
        return Work(0, 0, unknown=(name,) if name else ())


def _make_work(flops: int, dtype: str) -> Work:
    """Return the work of a product of one dtype."""
    return Work(flops, 0, flops_by_dtype=((dtype, flops),) if flops else ())


def _repeat(once: Work, times: int | fractions.Fraction) -> Work:
    """Return the work of several runs of a computation."""
    by_dtype = tuple((dtype, round(n * times)) for dtype, n in once.flops_by_dtype if times)
    return dataclasses.replace(
        once,
        flops=round(once.flops * times),
        memory_bytes=round(once.memory_bytes * times),
        flops_by_dtype=by_dtype,
    )


def _sum(parts: Sequence[Work]) -> Work:
    """Return the sum of several works."""
    by_dtype: collections.Counter[str] = collections.Counter()
    for part in parts:
        by_dtype.update(dict(part.flops_by_dtype))
    return Work(
        sum(p.flops for p in parts),
        sum(p.memory_bytes for p in parts),
        sum(p.unknown_loops for p in parts),
        tuple(dict.fromkeys(name for p in parts for name in p.unknown)),
        tuple(sorted(by_dtype.items())),
    )
