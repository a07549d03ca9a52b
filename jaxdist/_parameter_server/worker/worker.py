"""`Worker`: runs closures."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server import protocol
from jaxdist._parameter_server.closures.traced import Recent
from jaxdist._parameter_server.server import TOO_STALE
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.variables.shard_rows import NO_ROW
from jaxdist._parameter_server.worker.devices import (
    KeptValues,
    PutOn,
    check_platform,
    find_platform,
)
from jaxdist._parameter_server.worker_protocol import (
    Answer,
    Input,
    Source,
    TracedClosure,
    Update,
)
from jaxdist.errors import (
    ContextError,
    DeadlineExceededError,
    NotFiniteError,
    OtherProcessError,
    RowIndexError,
)

_TRIES = 100


def check_rows(closure: TracedClosure, what: str, name: str, ids: np.ndarray) -> None:
    """Check rows before any request: then a refused function has changed nothing on any server.

    Args:
        closure: The closure.
        what: What the closure does with the rows, such as `reads`.
        name: The name of the table, or of its shard, on the servers.
        ids: The numbers of the rows, counted from the first row of the shard.

    Raises:
        RowIndexError: One of them is not a row of the table.
    """
    part = closure.parts[name]
    wrong = ids[(ids < 0) | (ids >= part.rows)]
    if wrong.size:
        raise RowIndexError(
            f"{closure.name} {what} row {int(wrong[0]) + part.start} of {part.table!r}, which has "
            f"{part.total} rows.\n\n"
            "The numbers of its rows are integers from 0. The function has changed nothing.\n\n"
            f"Pass numbers from 0 to {part.total - 1}, or create the table with more rows."
        )


@dataclasses.dataclass(frozen=True)
class ClosureRun:
    """One run of a closure.

    Args:
        closure: The closure.
        arguments: The arrays that it was scheduled with.
        batches: The leaves of its batches, by iterator, batch and leaf.
        number: Its number.
        fence: Values that were kept from before this fence must be read again.
        done_below: Closures with lower numbers are finished.
        client: Who has numbered it.
    """

    closure: TracedClosure
    arguments: Sequence[Any]
    batches: Mapping[tuple[int, ...], Any]
    number: int
    fence: int = 0
    done_below: int = 0
    client: str = ""


class _Programs(NamedTuple):
    """The compiled programs of a closure, and whether they take values of 64 bits."""

    compiled: list[Any]
    has_64_bits: bool


_OF_64_BITS = {"int64", "uint64", "float64", "complex128"}


class Worker:
    """Runs closures on the devices of one worker.

    Cost:
        For each closure one exchange with each server that it changes variables of: changes go,
        and the new values of the variables that it reads come back. Before the first closure, and
        after the fence was raised, one more, which moves only what has changed.

    Args:
        servers: The servers.
        layout: The devices of the worker.
        max_staleness: The bound of the servers; None means none.
    """

    def __init__(
        self, servers: Servers, layout: ReplicaMesh, max_staleness: int | None = None
    ) -> None:
        self._servers, self._put = servers, PutOn(layout)
        self._platform = find_platform(layout)
        self._max_staleness = max_staleness
        self._kept = KeptValues(self._put)
        # How long the last closure took. Values that came with a reply are used only by a closure
        # that begins soon after: a worker that was idle would compute with values that are older
        # than a read at its beginning could be.
        self._seconds = 0.0
        self._programs: Recent[str, _Programs] = Recent(256)
        self._reads: Recent[str, dict[int, list[str]]] = Recent(256)
        self._used: Recent[str, list[int]] = Recent(256)

    def run(self, request: ClosureRun) -> Answer:
        """Run a closure, send its changes, and return its results.

        Those of several replicas are arrays of JAX, which a worker of this process returns.
        """
        closure = request.closure
        # Compile before the read: otherwise the values would be old when the program runs.
        programs = self._programs.find(closure.digest, lambda: self._compile(closure))
        began = time.monotonic()
        for _ in range(_TRIES):
            # Otherwise JAX would convert operands of 64 bits to 32: the program may be of another
            # process, or of a block with `jax.enable_x64`.
            with jax.enable_x64(True) if programs.has_64_bits else contextlib.nullcontext():
                outputs, changed = self._run_once(request, programs.compiled, began)
            # Its registration had expired, and its values are too old. It is computed again; what
            # another server has counted is not counted twice.
            if all(found.status != TOO_STALE for found in changed.values()):
                break
        else:
            raise DeadlineExceededError(
                f"{closure.name} was computed {_TRIES} times, and each time the values that it had "
                f"read were too old for max_staleness={self._max_staleness}.\n\n"
                "A worker that takes much longer than the others reads again and again.\n\n"
                "Make max_staleness larger, or do less work in the function."
            )
        self._seconds = time.monotonic() - began
        results = outputs[len(outputs) - closure.num_results :]
        if closure.num_replicas == 1:
            results = [np.asarray(x) for x in results]
        counted = {place: found.incarnation for place, found in changed.items()}
        used = self._used.find(closure.digest, lambda: list(self._servers.group(closure.variables)))
        read = {n: self._servers.links[n].incarnation for n in used if n not in counted}
        return Answer(state="done", counted=counted, read=read, results=results)

    def _run_once(
        self, request: ClosureRun, programs: Sequence[Any], began: float
    ) -> tuple[Sequence[Any], dict[int, protocol.Changed]]:
        """Read, compute and send the changes; return the outputs, and the replies of servers."""
        closure = request.closure
        registered: set[int] = set()
        try:
            self._read(request, began, registered)
            rows = self._read_rows(request, programs)
            outputs = self._compute(request, programs, rows)
            sent = [np.asarray(x) for x in outputs[: len(outputs) - closure.num_results]]
            changed = self._send(request, self._select(closure, sent), sent)
            registered -= changed.keys()
        finally:
            # Others wait for the changes of a closure that is registered.
            for link in (self._servers.links[place] for place in registered):
                with contextlib.suppress(OtherProcessError):
                    link.call(protocol.Release(request.client, request.number))
        return outputs, changed

    def _compute(
        self, request: ClosureRun, programs: Sequence[Any], rows: Sequence[Any]
    ) -> Sequence[Any]:
        closure = request.closure
        outputs: Sequence[Any]
        try:
            outputs = programs[0](*self._find_inputs(closure.inputs, request, rows))
        except (FloatingPointError, _compat.InvalidNumberError) as error:
            raise NotFiniteError(
                f"{closure.name} returned or sent a value that is not finite: {error.args[-1]}.\n\n"
                "With jax_debug_nans or jax_debug_infs a scheduled function fails then, and the "
                "servers have none of its changes.\n\n"
                f"Call {closure.name} with the same arguments outside of schedule: JAX then names "
                "the operation."
            ) from error
        return outputs

    # Reading

    def _read(self, request: ClosureRun, began: float, registered: set[int]) -> None:
        """Read the variables that the closure needs, where the kept values are too old.

        Args:
            request: The run.
            began: When it began.
            registered: Gets the servers on which the closure is registered.
        """
        closure, oldest = request.closure, began - self._seconds
        changed: Mapping[int, list[str]] = {}
        if self._max_staleness is not None:
            changed = self._servers.group([u.name for u in closure.updates])
        for place, names in self._group_reads(closure).items():
            old = [n for n in names if not self._kept.is_fresh(n, request.fence, oldest)]
            if not old and self._max_staleness is None:
                continue
            options: dict[str, Any] = self._kept.describe(names)
            if self._max_staleness is not None and place in changed:
                registered.add(place)
                # In the order of the servers; see the page on parameter servers.
                options |= {"closure": request.number, "register": changed[place]}
            asked = protocol.Read(names, client=request.client, **options)
            found = self._servers.links[place].call(asked)
            self._kept.keep(place, found, request.fence)

    def _group_reads(self, closure: TracedClosure) -> dict[int, list[str]]:
        return self._reads.find(closure.digest, lambda: self._servers.group(closure.reads))

    def _read_rows(self, request: ClosureRun, programs: Sequence[Any]) -> list[Any]:
        """Read the rows that the closure needs, each one once."""
        lookup = request.closure.lookup
        if lookup is None:
            return []
        ids = programs[1](*self._find_inputs(lookup.inputs, request, []))
        names = {i.index[0]: i.name for i in request.closure.inputs if i.source is Source.ROWS}
        found = []
        for number, wanted in enumerate(ids):
            # The program does not use the rows of this lookup.
            name = names.get(number)
            if name is None:
                found.append(None)
                continue
            unique, place = np.unique(np.asarray(wanted), return_inverse=True)
            check_rows(request.closure, "reads", name, unique)
            found.append(self._servers.read_rows_of_closure(name, unique)[place])
        return found

    # Computing

    def _compile(self, closure: TracedClosure) -> "_Programs":
        """Return the compiled programs of a closure: what it computes, and which rows it reads."""
        texts = [closure.exported] + ([closure.lookup.exported] if closure.lookup else [])
        loaded = [export.deserialize(bytearray(text)) for text in texts]
        check_platform(closure.name, loaded[0].platforms, self._platform)
        has_64_bits = any(a.dtype.name in _OF_64_BITS for one in loaded for a in one.in_avals)
        with jax.enable_x64(True) if has_64_bits else contextlib.nullcontext():
            return _Programs(self._compile_each(loaded), has_64_bits)

    def _compile_each(self, loaded: Sequence[export.Exported]) -> list[Any]:
        programs = []
        for one in loaded:
            # The zeros determine the devices. The program is never run with them: a loop of a user
            # may end only for other values.
            zeros = self._put([np.zeros(a.shape, a.dtype) for a in one.in_avals])
            program = jax.jit(one.call)
            if one.nr_devices > 1:
                # With shardings, zeros and later batches run the same program.
                shardings = one.in_shardings_jax(zeros[0].sharding.mesh)
                program = jax.jit(one.call, in_shardings=shardings)
                zeros = jax.device_put(zeros, list(shardings))
            programs.append(program.lower(*zeros).compile())
        return programs

    def _find_inputs(
        self, inputs: Sequence[Input], request: ClosureRun, rows: Sequence[Any]
    ) -> list[Any]:
        """Return the inputs of a program, on the devices of the worker."""
        found = [self._find(given, request, rows) for given in inputs]
        new = [n for n, given in enumerate(inputs) if given.source is not Source.VARIABLE]
        for n, value in zip(new, self._put.as_inputs([found[n] for n in new]), strict=True):
            found[n] = value
        return found

    def _find(self, given: Input, request: ClosureRun, rows: Sequence[Any]) -> Any:
        match given.source:
            case Source.VARIABLE:
                return self._kept.get(given.name)
            case Source.ARGUMENT:
                return request.arguments[given.index[0]]
            case Source.BATCH:
                return request.batches[given.index]
            case Source.ROWS:
                return rows[given.index[0]]
            case Source.NUMBER:
                return np.uint32(request.number)

    # Changing

    def _select(self, closure: TracedClosure, outputs: Sequence[np.ndarray]) -> list[Update]:
        """Return the changes that the closure has made."""
        made = []
        for update in closure.updates:
            times = 1 if update.count is None else int(outputs[update.count])
            if update.is_once and times > 1:
                raise _make_twice_error(closure.name, update, times)
            if times:
                made.append(update)
        return made

    def _send(
        self, request: ClosureRun, updates: Sequence[Update], outputs: Sequence[np.ndarray]
    ) -> dict[int, protocol.Changed]:
        """Send the changes, keep the new values that come back, and return the replies."""
        if not updates:
            return {}
        reads = set(request.closure.reads)
        by_server: dict[int, list[protocol.Change]] = {}
        for update in updates:
            version = self._kept.find_version(update.name) if update.name in reads else None
            operands = [outputs[n] for n in update.operands]
            if update.op.startswith("scatter_"):
                if not request.closure.parts[update.name].is_whole:
                    # Rows without a number belong to another shard.
                    is_own = operands[0] != NO_ROW
                    operands = [x[is_own] for x in operands] if not is_own.all() else operands
                check_rows(request.closure, f"calls {update.op} of", update.name, operands[0])
            change = protocol.Change(update.op, update.name, operands, version)
            by_server.setdefault(self._servers.find_server(update.name), []).append(change)
        wanted = {} if self._max_staleness is not None else self._group_reads(request.closure)
        found = self._servers.call_each(
            {
                place: self._make_request(request, changes, wanted.get(place, []))
                for place, changes in by_server.items()
            }
        )
        for place, changed in found.items():
            self._kept.keep(place, changed, request.fence)
        return found

    def _make_request(
        self, request: ClosureRun, changes: Sequence[protocol.Change], wanted: Sequence[str]
    ) -> protocol.ChangeVariables:
        """Return the request that sends changes to one server, and asks it for new values."""
        names = [c.name for c in changes if c.version is not None]
        incarnation = self._kept.get_incarnation(names[0]) if names else None
        options: dict[str, Any] = {"incarnation": incarnation, **self._kept.describe(wanted)}
        return protocol.ChangeVariables(
            changes,
            client=request.client,
            closure=request.number,
            done_below=request.done_below,
            read=wanted,
            **options,
        )


def _make_twice_error(function: str, update: Update, times: int) -> ContextError:
    return ContextError(
        f"{function} called {update.what} {times} times for {update.name!r}.\n\n"
        "The servers update a variable once for each function, when it has run.\n\n"
        "Schedule the function once for each step."
    )
