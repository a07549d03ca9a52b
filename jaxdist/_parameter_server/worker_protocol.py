"""The requests to workers, and their answers; and closures, as workers get them."""

import enum
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxdist._parameter_server.transport.calls import Failure
from jaxdist._parameter_server.transport.requests import Array, Reply, Request


class Source(enum.Enum):
    """Where an input of a closure's program comes from."""

    VARIABLE = "variable"  # the value of a variable on the servers
    ARGUMENT = "argument"  # an array that was passed when the closure was scheduled
    BATCH = "batch"  # a leaf of a batch of a per-worker dataset
    ROWS = "rows"  # rows of a variable, whose numbers `Lookup` computes
    NUMBER = "number"  # the number of the closure


class Input(msgspec.Struct, frozen=True, array_like=True):
    """One input of the program of a closure.

    Args:
        source: Where it comes from.
        name: The name of the variable on the servers; else empty.
        index: The number of the argument; of a batch: its iterator, which batch, which leaf; of
            rows: which result of the lookup.
    """

    source: Source
    name: str = ""
    index: tuple[int, ...] = ()


class Update(msgspec.Struct, frozen=True, array_like=True):
    """One change that a closure sends, by the numbers of the program's results.

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


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Which rows of a table one shard has, or a variable that is in no shards.

    Args:
        table: The name of the table.
        start: The number of the shard's first row in the table.
        rows: How many rows the shard has.
        total: How many rows the table has.
    """

    table: str
    start: int
    rows: int
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return self.rows == self.total


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """A program that computes which rows a closure reads, from the closure's other inputs.

    Args:
        exported: The program, as `jax.export` writes it.
        inputs: Its inputs.
    """

    exported: Array
    inputs: tuple[Input, ...]


class TracedClosure(
    msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True
):
    """A closure for arguments of one shape.

    Args:
        name: The name of the function, for messages.
        exported: Its program, as `jax.export` writes it.
        inputs: The inputs of the program.
        updates: The changes that it sends.
        num_results: How many results of the program are returned to the caller; they come last.
        batches: How many batches it takes from each iterator.
        digest: The digest of all of it; see `with_digest`.
        num_replicas: On how many devices of a worker it runs.
        lookup: Which rows of variables it reads; None if it reads none.
        parts: For each variable whose rows it reads or changes, by the name on the servers, which
            rows of its table these are.
    """

    name: str
    exported: Array
    inputs: tuple[Input, ...]
    updates: tuple[Update, ...]
    num_results: int
    batches: tuple[int, ...]
    digest: str = ""
    num_replicas: int = 1
    lookup: Lookup | None = None
    parts: Mapping[str, Part] = {}

    def with_digest(self) -> "TracedClosure":
        """Return it with its digest, by which workers know it."""
        content = msgspec.msgpack.encode(self, enc_hook=_encode)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return msgspec.structs.replace(self, digest=digest)

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


def _encode(value: Any) -> Any:
    """Return the bytes of an array, and the string of another value that msgspec cannot encode."""
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


class WorkerInfo(Reply, frozen=True):
    """The identity of a worker.

    Args:
        task: The name of the task, such as `worker:0`.
        incarnation: The id of this start: another one has nothing of what was sent before.
        platform: Its platform, as `jax.export` names it.
    """

    task: str
    incarnation: str = ""
    platform: str = ""


class HelloWorker(Request[WorkerInfo], frozen=True):
    """Greets a worker, which works for this coordinator from then on.

    Args:
        client: The id of the coordinator's run; "" from one that only asks for the identity.
        servers: The addresses of the parameter servers; None if the coordinator takes the task for
            one of them. It then returns only its name.
        max_staleness: Their bound.
    """

    method = "hello"

    client: str = ""
    servers: Sequence[str] | None = None
    max_staleness: int | None = None


class Answer(Reply, frozen=True, kw_only=True):
    """The outcome of a request to a worker.

    Args:
        state: `done`; `running`: ask again with `WaitForAttempt`; `failed`: see `error`; `stranger`
            or `old`: the worker works for another coordinator, or was asked for something else
            since; `unknown`: it does not have the closure; `shapes`: the closure is for other
            batches.
        counted: The servers that have counted the closure, by number, with their incarnation.
        read: The servers that it only reads, likewise.
        shapes: The shapes of the batches, as `describe_tree` describes them.
        tree: The structure of what was made, likewise; None for a dataset.
        error: What was raised.
        results: The results of the closure.
    """

    state: str
    counted: Mapping[int, str] = {}
    read: Mapping[int, str] = {}
    shapes: Sequence[Any] = ()
    tree: Any = None
    error: Failure | None = None
    results: Sequence[Array] = ()


class Load(Request[Answer], frozen=True):
    """Brings a closure to a worker.

    Args:
        client: Whose closure it is.
        closure: The closure.
        places: The number of the server of each variable.
        shapes: The batches that it takes, by iterator, as `describe_tree` describes them.
    """

    method = "load"

    client: str
    closure: TracedClosure
    places: Mapping[str, int]
    shapes: Sequence[Any]


class Run(Request[Answer], frozen=True, kw_only=True):
    """Runs a closure.

    Args:
        client: The id that belongs to its number.
        attempt: The number of this message among those of the client to this worker. A message that
            comes twice runs nothing.
        digest: Which closure.
        number: Its number.
        fence: Values that were kept from before it are read again.
        done_below: Closures with lower numbers are finished.
        iterators: The iterators that it takes batches from.
        references: For each argument None for the next one of `arguments`, or the id of a value of
            this worker and the number of its leaf.
        arguments: The arrays that are sent.
        forget: Values that nobody needs any more.
    """

    method = "run"

    client: str
    attempt: int
    digest: str
    number: int
    fence: int
    done_below: int
    iterators: Sequence[int]
    references: Sequence[tuple[int, int] | None]
    arguments: Sequence[Array]
    forget: Sequence[int] = ()


class Make(Request[Answer], frozen=True, kw_only=True):
    """Makes a dataset, or an iterator over one.

    Args:
        client: For whom.
        attempt: As in `Run`.
        number: What it is called from now on.
        functions: The names of a dataset function, as `module:qualname`.
        script: The script of the client, for a function of `__main__`.
        dataset: The number of the dataset to iterate over, if there is no function.
        forget: Values that nobody needs any more.
    """

    method = "make"

    client: str
    attempt: int
    number: int
    functions: Sequence[str] = ()
    script: str = ""
    dataset: int | None = None
    forget: Sequence[int] = ()


class WaitForAttempt(Request[Answer], frozen=True):
    """Asks for the answer to an attempt that was started before."""

    method = "wait"

    client: str
    attempt: int


class Cancel(Request[Answer], frozen=True):
    """Asks the worker not to run a closure, if it has not begun."""

    method = "cancel"

    client: str
    number: int


class End(Request[Answer], frozen=True):
    """Says that the process of the coordinator ends."""

    method = "end"

    client: str
