"""A compiled step, and its description as text."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxdist import hlo
from jaxdist._program.arguments.compiler_options import format_options
from jaxdist._program.report.explanation import Explanation, describe_layout, explain_program
from jaxdist._reports import name_cells


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A compiled step: what `Strategy.run` would execute."""

    # The `Program` that this was compiled from. Its class is in a room above this one.
    program: Any
    executable: jax.stages.Compiled

    def as_text(self) -> str:
        """Return the optimized HLO as text.

        Example:
            >>> program = OneDeviceStrategy("cpu:0").lower(lambda: 1 + jnp.ones(2))
            >>> "ENTRY" in program.compile().as_text()
            True
        """
        # Cached, because XLA prints a large program in seconds and several properties parse it.
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return self.executable.as_text() or ""

    @property
    def collectives(self) -> tuple[hlo.CompiledCollective, ...]:
        """The collectives of the compiled program.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_reduce("sum", x)
            >>> compiled = MirroredStrategy().lower(step, (PerReplica(range(8)),)).compile()
            >>> [(c.kind, c.operands) for c in compiled.collectives]
            [('all-reduce', 1)]
        """
        return hlo.collectives(self.as_text())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled program to a file, which `RunOptions(saved_program=path)` loads.

        Another process with the same versions of JAX, the same devices and the same flags then runs
        the step without compiling it. Each difference is an error before anything is loaded. A
        program for described TPUs runs on such TPUs. A saved program is code: whoever can write
        the file can run code in the process that loads it.

        Cost:
            One lowering; the file has the size of the executable. On CPU with JAX's compilation
            cache, one compilation.

        Args:
            path: The file. An existing one is replaced.

        Raises:
            UnsupportedError: JAX cannot serialize the program, or it calls back into Python
                (`jax.debug.print`).
            SavedProgramError: The file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> file = pathlib.Path(tempfile.mkdtemp(), "step.program")
            >>> def step(x):
            ...     return x + 1
            >>> strategy = MirroredStrategy()
            >>> strategy.lower(step, (1.0,)).compile().save(file)
            >>> float(strategy.run(step, (1.0,), options=RunOptions(saved_program=file)))
            2.0

        Source:
            `jax.experimental.serialize_executable`.
        """
        self.program._save(path, self.executable)

    def explain(self) -> Explanation:
        """Return what this program communicates, and what became of each collective of the step.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_reduce("sum", x)
            >>> compiled = MirroredStrategy().lower(step, (PerReplica(range(8)),)).compile()
            >>> [asked.outcome for asked in compiled.explain().asked]
            ['compiled']
        """
        program = self.program
        return explain_program(
            program.name,
            program.layout,
            program.traced_collectives,
            program.told,
            self.as_text(),
            program.placed,
            program.asked_options,
        )


def text(program: Any) -> str:
    """Return the `repr` of a `Program`."""
    layout = program.layout
    where = describe_layout(layout)
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
        *([f"    {name_cells(repr(c))}" for c in program.traced_collectives] or ["    none"]),
    ]
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
