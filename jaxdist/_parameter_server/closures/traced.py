"""A closure after its trace, with what it needs and changes; and those that were used last."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jaxdist._parameter_server.protocol import as_array
from jaxdist._parameter_server.worker_protocol import Input, Load, Part, Source, Update


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

    @functools.cached_property
    def variables(self) -> tuple[str, ...]:
        """The names of all variables that it reads or changes."""
        inputs = [*self.inputs, *(self.lookup.inputs if self.lookup else ())]
        read = [i.name for i in inputs if i.source in (Source.VARIABLE, Source.ROWS)]
        return tuple(dict.fromkeys([*read, *(u.name for u in self.updates)]))

    def make_request(
        self, client: str, find_server: Callable[[str], int], shapes: Sequence[Any]
    ) -> Load:
        """Return the request that brings it to a worker.

        Args:
            client: Whose closure it is.
            find_server: Returns the number of the server of a variable.
            shapes: The batches that it takes, as `describe_tree` describes them.
        """
        lookup = self.lookup
        return Load(
            client=client,
            name=self.name,
            digest=self.digest,
            program=as_array(self.exported),
            inputs=self.inputs,
            updates=self.updates,
            num_results=self.num_results,
            batches=self.batches,
            lookup=() if lookup is None else lookup.inputs,
            lookup_program=None if lookup is None else as_array(lookup.exported),
            places={name: find_server(name) for name in self.variables},
            shapes=shapes,
            parts=self.parts,
        )


def read_request(load: Load) -> TracedClosure:
    """Return the closure of a request. What the function returns is known to the client only."""
    program = load.lookup_program
    return TracedClosure(
        load.name,
        load.program.tobytes(),
        load.digest,
        load.inputs,
        load.updates,
        load.num_results,
        Structure(None, 0),
        load.batches,
        1,
        None if program is None else Lookup(program.tobytes(), load.lookup),
        load.parts,
    )


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict that drops the entries that were not used for longest.

    A weak dict would not do: the program of a function refers to the function.

    Args:
        size: How many entries to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def find(
        self, key: K, make: Callable[[], V], is_current: Callable[[V], bool] = lambda _: True
    ) -> V:
        """Return an entry; make it if it is not there, or not current."""
        found = self._entries.get(key)
        if found is not None and not is_current(found):
            del self._entries[key]
            found = None
        if found is None:
            # An error in `make` leaves no entry.
            found = self._entries[key] = make()
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return found
