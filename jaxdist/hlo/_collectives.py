"""Finds the collectives of a compiled program."""

import collections
import dataclasses
import fractions
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from jaxdist.hlo import _text
from jaxdist.hlo._groups import GROUPS, PAIRS, Groups, decoded, find_connected, parse_pairs
from jaxdist.hlo._known import KINDS
from jaxdist.hlo._text import Instruction, Module, find_part
from jaxdist.hlo._trips import count_trips

# Between slices of TPUs, a collective is a pair of send and recv, which another runtime executes.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_SLICES = re.compile(r"_xla_megascale_target=(?P<target>\"[^\"]*\"|\{\{.*?\}\})")
# The compiler for TPUs overlaps a collective with other work by writing it into several fusions.
# The first one starts the collective, and the others continue it, so it must count only once.
_LAID_OVER = re.compile(r"channel_id=(\d+).*async_collective_fusion_config")
_BEGINS = 'custom_call_target="AsyncCollectiveStart"'
_TRANSFERS = {"ONE_TO_ONE": "collective-permute"}
# The compiler for TPUs writes a reduce-scatter as a fusion of an all-reduce and a slice of it.
_SCATTERED = "all-reduce-scatter"


# How often a computation runs; None if that is not constant.
Times: TypeAlias = "int | fractions.Fraction | None"


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective operation of a compiled program.

    `bytes_per_device` is the size of its results on one device, and `operand_bytes` that of its
    operands: smaller for an all-gather, larger for a reduce-scatter.
    """

    kind: str
    operands: int
    bytes_per_device: int
    replica_groups: str  # as written in the text
    operand_bytes: int = 0
    groups: Groups = ()  # numbers of devices in the order of the mesh
    pairs: tuple[tuple[int, int], ...] = ()  # of a collective-permute: from, to
    times: int | None = 1  # how often it runs; None if the count of a loop is not constant
    in_loop: bool = False
    in_branch: bool = False  # may not run at all
    between_slices: bool = False  # over the network between slices of TPUs
    source: str = ""  # file:line (function) of the user's call; "" if the text has none
    # The lines of all calls, if XLA combined several collectives into this one. `source` is first.
    sources: tuple[str, ...] = ()
    op_name: str = ""  # JAX's name of the operation, with the functions around it

    @property
    def group_size(self) -> int:
        """The number of devices in a group; if groups differ in size, the largest."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def bytes_sent(self) -> float:
        """The least bytes that one device sends, for any algorithm of messages."""
        n = self.group_size
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes_per_device)
        whole = max(self.bytes_per_device, self.operand_bytes)
        return (2 if self.kind == "all-reduce" else 1) * (n - 1) / n * whole


def collectives(text: str) -> tuple[CompiledCollective, ...]:
    """Return the collectives in optimized HLO text, in program order.

    An asynchronous collective, with a start and a done, counts once. A collective in a loop or in a
    called computation has one entry, with the number of times that it runs.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Returns:
        One entry for each operation.

    Example:
        >>> [c] = collectives("%r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%a")
        >>> c.kind, c.operands, c.bytes_per_device, c.groups
        ('all-reduce', 1, 16, ((0, 1),))
    """
    return tuple(find_collectives(_text.read(text)).values())


def find_collectives(module: Module) -> "dict[tuple[str, str], CompiledCollective]":
    """Return the collectives by the names of their computations and of their instructions."""
    walk = _Walk(module)
    walk.computation(module.entry, 1, in_loop=False, in_branch=False)
    return {key: walk.make(key[0], *found) for key, found in walk.found.items()}


class _Walk:
    """A walk over calls, loops and branches, from the entry computation on."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.found: dict[tuple[str, str], tuple[str, Instruction]] = {}
        # How often a computation runs, whether in a loop, and whether in a branch, for each call.
        self._runs: dict[str, list[tuple[Times, bool, bool]]] = collections.defaultdict(list)
        computations = module.computations.values()
        self._begun = {
            channel[1]
            for c in computations
            if _is_start(c)
            for i in c.values()
            if (channel := _LAID_OVER.search(i.rest))
        }

    def computation(self, name: str, times: Times, *, in_loop: bool, in_branch: bool) -> None:
        """Add the collectives of a computation that runs `times` times, with their kinds."""
        self._runs[name].append((times, in_loop, in_branch))
        for written in self.module.computations.get(name, {}).values():
            instruction = _text.resolve_start(written)
            for inner, factor, loop, branch in self._inside(name, instruction):
                all_times = None if times is None or factor is None else times * factor
                self.computation(
                    inner, all_times, in_loop=in_loop or loop, in_branch=in_branch or branch
                )
            kind = _find_kind(instruction)
            if kind == "all-reduce" and self._find_slice(name, instruction) is not None:
                kind = "reduce-scatter"
            if kind is not None and not self._is_continuation(name, instruction):
                # Two calls of one computation run the same collective.
                self.found.setdefault((name, instruction.name), (kind, instruction))

    def _find_slice(self, name: str, instruction: Instruction) -> Instruction | None:
        """Return the slice that a fused reduce-scatter takes of its all-reduce; None for others."""
        if not name.startswith(_SCATTERED):
            return None
        users = [
            i for i in self.module.computations[name].values() if instruction.name in i.operands
        ]
        [user] = users if len(users) == 1 else [None]
        return user if user is not None and user.opcode == "dynamic-slice" else None

    def _is_continuation(self, name: str, instruction: Instruction) -> bool:
        """Whether this instruction continues a collective that another fusion has started."""
        channel = _LAID_OVER.search(instruction.rest)
        # Only if the text has the start. Otherwise the collective would not be counted at all.
        has_begun = channel is not None and channel[1] in self._begun
        return has_begun and not _is_start(self.module.computations[name])

    def _inside(
        self, name: str, instruction: Instruction
    ) -> Iterator[tuple[str, Times, bool, bool]]:
        """Yield computations that an instruction runs: name, count, in a loop, in a branch."""
        # These name the same computation as their start, which has counted it.
        if instruction.opcode.endswith(("-update", "-done")):
            return
        count: int | None = None
        if instruction.opcode == "while":
            count = count_trips(self.module, self.module.computations[name], instruction)
        for how, inner in instruction.called:
            if how == "body":
                yield inner, count, True, False
            elif how == "condition":
                # A loop checks its condition once more than it runs its body.
                yield inner, None if count is None else count + 1, True, False
            else:
                branch = how in ("branch_computations", "true_computation", "false_computation")
                yield inner, find_part(instruction) if branch else 1, False, branch

    def make(self, name: str, kind: str, instruction: Instruction) -> CompiledCollective:
        """Return a collective of a computation, with the number of times that it runs in all."""
        times, in_loop, in_branch = zip(*self._runs[name], strict=True)
        noted = _text.metadata(instruction)
        within = self.module.computations[name]
        operands = instruction.operands
        if instruction.opcode == "send":
            operands = operands[:1]
            # The shape of a send is that of the operand; the results have the shape of the recv.
            results = _received_bytes(instruction, within)
        else:
            part = self._find_slice(name, instruction) if kind == "reduce-scatter" else None
            results = _text.num_bytes((part or instruction).shape)
        operand_bytes = sum(_text.num_bytes(within[o].shape) for o in operands if o in within)
        if not any(o in within for o in operands):
            # A text of only a part of a program may lack the operands.
            operand_bytes = results
        raw, groups, pairs = self._groups(kind, instruction)
        sources = tuple(s for s in dict.fromkeys(self._sources(noted, instruction, within)) if s)
        return CompiledCollective(
            kind=kind,
            operands=len(operands),
            bytes_per_device=results,
            replica_groups=raw,
            operand_bytes=operand_bytes,
            groups=groups,
            pairs=pairs,
            times=None if None in times else round(sum(times)),
            in_loop=any(in_loop),
            in_branch=all(in_branch),
            between_slices=instruction.opcode == "send",
            source=sources[0] if sources else "",
            sources=sources,
            op_name=noted.get("op_name", ""),
        )

    def _sources(
        self, noted: dict[str, str], instruction: Instruction, within: dict[str, Instruction]
    ) -> Iterator[str]:
        """Yield the line of an operation, and the lines of its results if it has several."""
        yield _text.source(self.module, noted)
        # XLA keeps one line for a combined collective. The lines of the others are on the
        # instructions that take its results apart.
        if len(instruction.operands) > 1:
            for user in within.values():
                if user.opcode == "get-tuple-element" and user.operands == (instruction.name,):
                    yield _text.source(self.module, _text.metadata(user))

    def _groups(
        self, kind: str, instruction: Instruction
    ) -> tuple[str, Groups, tuple[tuple[int, int], ...]]:
        """Return the groups of a collective as text and as numbers, and the pairs of a permute."""
        if instruction.opcode == "send":
            target = _SLICES.search(instruction.rest)
            return _parse_slices(target["target"].strip('"') if target else "")
        pairs = PAIRS.search(instruction.rest)
        if kind == "collective-permute" and pairs is not None:
            listed = parse_pairs(pairs["pairs"])
            return "{}", find_connected(listed), listed
        written = GROUPS.search(instruction.rest)
        raw = written["groups"] if written else "{}"
        return raw, decoded(raw, self.module.participants), ()


def _is_start(computation: Mapping[str, Instruction]) -> bool:
    """Whether a computation starts a collective that other fusions continue."""
    return any(_BEGINS in i.rest for i in computation.values())


def _find_kind(instruction: Instruction) -> str | None:
    """Return the kind of a collective, or None if the instruction is not a collective."""
    opcode = instruction.opcode
    transfer = _BETWEEN_SLICES.search(instruction.rest) if opcode == "send" else None
    if transfer is not None:
        return _TRANSFERS.get(transfer[1], transfer[1].lower().replace("_", "-"))
    return opcode if opcode in KINDS else None


def _received_bytes(send: Instruction, within: dict[str, Instruction]) -> int:
    """Return the bytes of the `recv` that belongs to a `send`."""
    # The two instructions have the same rendezvous name.
    meeting = _RENDEZVOUS.search(send.rest)
    for other in within.values():
        if other.opcode == "recv" and meeting and meeting[0] in other.rest:
            send = other
    return _text.num_bytes(_text.elements(send.shape)[0])


_CORES = re.compile(r"\{(?P<slices>[\d,:]+)\}x\{(?P<cores>[\d,:]+)\}")
_PAIR = re.compile(r"(\d+)->(\d+)")
# The number of a device of slice s is (s + 1) x this, plus its number in the slice.
_SLICE = 100_000


def _parse_slices(target: str) -> tuple[str, Groups, tuple[tuple[int, int], ...]]:
    """Return the groups between slices.

    Devices are numbered as `slice * 100000 + core`, and slices from 1.
    """
    crossed = _CORES.match(target)
    if crossed is not None:
        slices, cores = _parse_ranges(crossed["slices"]), _parse_ranges(crossed["cores"])
        return target, tuple(tuple(s * _SLICE + c for s in slices) for c in cores), ()
    pairs = tuple((int(a), int(b)) for a, b in _PAIR.findall(target))
    if pairs:
        return target, find_connected(pairs), pairs
    return target, decoded(target, 1), ()


def _parse_ranges(text: str) -> list[int]:
    """Return the numbers of `0:3` or `0,1,2,3`, which are the same."""
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition(":")
        numbers += range(int(low), int(high or low) + 1)
    return numbers
