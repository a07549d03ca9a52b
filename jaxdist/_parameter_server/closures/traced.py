"""A closure after its trace: its program, what the program needs, and what it changes."""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._parameter_server.variables.shard_rows import Part


class Source(enum.Enum):
    """Where an input of a closure's program comes from."""

    VARIABLE = "variable"  # the value of a variable on the servers
    ARGUMENT = "argument"  # an array that was passed when the closure was scheduled
    BATCH = "batch"  # a leaf of a batch of a per-worker dataset
    ROWS = "rows"  # rows of a variable, whose numbers `Lookup` computes
    NUMBER = "number"  # the number of the closure


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of the program.

    Args:
        source: Where it comes from.
        name: The name of the variable on the servers; else empty.
        index: The number of the argument; of a batch: its iterator, which batch, which leaf; of
            rows: which result of the lookup.
    """

    source: Source
    name: str = ""
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Update:
    """One change that the closure sends, by the numbers of the program's results.

    Args:
        op: The operation of the server.
        name: The name of the variable on the servers.
        operands: The results that are its operands.
        count: The result that tells how often the closure made the change; None if always once.
        is_once: Whether more than once is an error, and not only a later value.
        what: What it is called in messages.
    """

    op: str
    name: str
    operands: tuple[int, ...]
    count: int | None = None
    is_once: bool = False
    what: str = ""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A program that computes which rows a closure reads, from the closure's other inputs.

    Args:
        exported: The program, as `jax.export` writes it.
        inputs: Its inputs.
    """

    exported: bytes
    inputs: tuple[Input, ...]


@dataclasses.dataclass(frozen=True)
class Structure:
    """How the results of the program become what the function returns.

    Args:
        treedef: The structure of the new state of NNX objects, and of what the function returns.
        num_state: How many leaves of it are state.
    """

    treedef: Any
    num_state: int

    def build(self, results: Sequence[Any]) -> Any:
        """Return what the function returns."""
        return self.treedef.unflatten([*[None] * self.num_state, *results])[1]


@dataclasses.dataclass(frozen=True)
class TracedClosure:
    """A closure for arguments of one shape.

    Args:
        name: The name of the function, for messages.
        exported: Its program, as `jax.export` writes it.
        digest: The digest of the program and of what it reads and changes.
        inputs: The inputs of the program.
        updates: The changes that it sends.
        num_results: How many results of the program are returned to the caller; they come last.
        structure: What the function returns, of these results.
        batches: How many batches it takes from each iterator.
        num_replicas: On how many devices of a worker it runs.
        lookup: Which rows of variables it reads; None if it reads none.
        parts: For each shard of a table whose rows it reads or changes by their numbers, by the
            name on the servers, which rows of the table these are.
    """

    name: str
    exported: bytes
    digest: str
    inputs: tuple[Input, ...]
    updates: tuple[Update, ...]
    num_results: int
    structure: Structure
    batches: tuple[int, ...]
    num_replicas: int
    lookup: Lookup | None = None
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of the variables that it reads."""
        return tuple(i.name for i in self.inputs if i.source is Source.VARIABLE)
