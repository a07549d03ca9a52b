"""The report of `explain` for a program: memory, communication, and possible improvements."""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist._explain.draw import draw_program
from jaxdist._explain.findings import Finding, find_in_program, show_findings
from jaxdist._explain.leaves import find_itemsize
from jaxdist._explain.shards import Leaf, list_axes, list_shards
from jaxdist._planning import get_roles
from jaxdist._program import Explanation, InSlot, Program
from jaxdist._reports import Report, Table, plural, share, size

_MOST_ARGUMENTS = 12


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device, from the memory analysis of XLA.

    Args:
        arguments: The arguments that the program uses.
        results: The results, including those in the memory of donated arguments.
        reused: Results that are in the memory of donated arguments.
        temporaries: Buffers that exist while the program runs.
        code: The code of the program.
    """

    arguments: int
    results: int
    reused: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """The memory while the program runs."""
        return self.arguments + self.results - self.reused + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class ProgramArgument:
    """An argument of a program, and whether its memory is donated to the results."""

    leaf: Leaf
    is_donated: bool


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramReport(Report):
    """The memory and the communication of a compiled step.

    Args:
        name: The name of the step.
        memory: Bytes of one device.
        arguments: The arguments, in their order.
        communication: The collectives; `Program.explain` returns the same.
        findings: Possible improvements.

    Example:
        >>> program = MirroredStrategy().lower(lambda x: x + 1, (jnp.ones(8),))
        >>> report = jaxdist.explain(program)
        >>> report.memory.arguments, report.arguments[0].leaf.describe()
        (32, 'whole on 8 devices')
    """

    name: str
    memory: ProgramMemory
    arguments: tuple[ProgramArgument, ...]
    communication: Explanation
    findings: tuple[Finding, ...] = ()

    def argument_bytes(self, role: str) -> int:
        """Return the bytes of the arguments of one role on a device."""
        return sum(a.leaf.device_bytes for a in self.arguments if a.leaf.role == role)

    def rows(self) -> list[tuple[str, int]]:
        """Return the rows of the memory table, names and bytes, without the sum."""
        m = self.memory
        named = [(f"arguments: {use}", num_bytes) for use, num_bytes in self._by_use().items()]
        # A program has no memory for an argument that it does not use, and on TPUs the layout of
        # an argument may add padding.
        rest = m.arguments - sum(n for _, n in named)
        if rest:
            named.append(("arguments: not used" if rest < 0 else "arguments: padding", rest))
        return [
            *named,
            ("results", m.results),
            ("results in donated memory", -m.reused),
            ("temporaries", m.temporaries),
            ("program", m.code),
        ]

    def save_png(self, path: str | Path) -> Path:
        """Draw the memory of a device while the program runs.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A picture cannot be written to the path.
        """
        return draw_program(path, f"Memory of a device in {self.name}", self.rows())

    def parts(self) -> Iterator[Table | str]:
        """Yield tables and sentences."""
        total = self.memory.total
        columns = ("what", "bytes", "size", "part")
        rows = [
            (what, f"{n:,}", ("-" if n < 0 else "") + size(abs(n)), _part(n, total))
            for what, n in self.rows()
            if n
        ]
        rows.append(("in all", f"{total:,}", size(total), ""))
        title = f"Memory of a device while {self.name} runs"
        yield Table(title, columns, tuple(rows), frozenset(columns[1:]))
        if self.arguments:
            yield self._arguments()
        if len(self.arguments) > _MOST_ARGUMENTS:
            rest = self._by_size()[_MOST_ARGUMENTS:]
            held = sum(a.leaf.device_bytes for a in rest)
            yield f"  and {plural(len(rest), 'smaller argument')}, {size(held)}"
        yield from self.communication.parts()
        yield from show_findings(self.findings)

    def _by_use(self) -> dict[str, int]:
        """Return the bytes of each use on a device."""
        found: collections.Counter[str] = collections.Counter()
        for a in self.arguments:
            found[a.leaf.use] += a.leaf.device_bytes
        return found

    def _by_size(self) -> list[ProgramArgument]:
        return sorted(self.arguments, key=lambda a: -a.leaf.device_bytes)

    def _arguments(self) -> Table:
        return Table(
            "Arguments, the largest first",
            ("argument", "what", "for", "on a device", "where", "donated"),
            tuple(
                (
                    a.leaf.name,
                    a.leaf.array,
                    a.leaf.use,
                    size(a.leaf.device_bytes),
                    a.leaf.describe(),
                    "yes" if a.is_donated else "no",
                )
                for a in self._by_size()[:_MOST_ARGUMENTS]
            ),
            frozenset({"on a device"}),
        )


def _part(num_bytes: int, total: int) -> str:
    return share(num_bytes / total) if num_bytes > 0 and total else ""


def explain_program(program: Program) -> ProgramReport:
    """Compile a program, and return its report."""
    compiled = program.compile()
    names, slots = program.input_names, program.signature.inputs
    roles = get_roles(program.signature)
    arguments = tuple(
        ProgramArgument(_make_leaf(name, role.value, slot), number in program.donated)
        for number, (name, role, slot) in enumerate(zip(names, roles, slots, strict=True))
    )
    communication = compiled.explain()
    return ProgramReport(
        program.name,
        _read_memory(compiled.executable.memory_analysis()),
        arguments,
        communication,
        tuple(find_in_program(program, compiled, [a.leaf for a in arguments], communication)),
    )


def _read_memory(analysis: Any) -> ProgramMemory:
    return ProgramMemory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.generated_code_size_in_bytes,
    )


def _make_leaf(name: str, role: str, slot: InSlot) -> Leaf:
    """Return an argument as an array of a pytree."""
    shape, item = slot.shape, find_itemsize(slot.dtype)
    logical = shape
    if slot.cut is not None:
        logical = (*shape[: slot.cut.dim], slot.cut.size, *shape[slot.cut.dim + 1 :])
    return Leaf(
        name,
        role.removesuffix("_state"),
        str(slot.dtype),
        logical,
        shape,
        item,
        slot.kind.value,
        tuple(list_shards(slot.sharding, shape, item)),
        list_axes(slot.sharding, len(shape)),
        # Arguments with an unknown role have the name of their argument, such as `args[1]`.
        use=name.partition("]")[0] + "]" if role == "other_state" and name[:5] == "args[" else "",
    )
