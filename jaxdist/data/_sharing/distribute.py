"""Makes the readers and assemblers with which several processes read a dataset, by policy."""

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement, at_leaving, get_agreement
from jaxdist.data._assembler import Assembler
from jaxdist.data._options import InputOptions
from jaxdist.data._pad import FixedRows
from jaxdist.data._place import Placer
from jaxdist.data._prefetch import stop_all
from jaxdist.data._reading.batches import Batches
from jaxdist.data._reading.elements import ElementReader
from jaxdist.data._reading.files import Files, FilesIterator
from jaxdist.data._reading.partial_batch import (
    GROUP_CALLER,
    SPLIT_CALLER,
    Drops,
    PartialBatch,
    round_up,
    split_rows,
)
from jaxdist.data._reading.readers import GroupReader, ParallelReader, Reader
from jaxdist.data._reading.shard_policy import AutoShardPolicy, choose_policy
from jaxdist.data._reading.sources import Source
from jaxdist.data._sharing.exchange import Exchange
from jaxdist.data._sharing.share import (
    Cut,
    GrainBatches,
    OwnBatches,
    PieceReader,
    ShareReader,
    cut_evenly,
    find_grain_batches,
)
from jaxdist.data._sharing.split import GlobalAssembler, GroupAssembler, LocalAssembler
from jaxdist.errors import ContextError

_LOG = logging.getLogger("jaxdist")
_HAS_CALLBACK: list[bool] = []
_Parts: TypeAlias = tuple[ElementReader, Placer, int, PartialBatch, Drops, FixedRows]


@dataclasses.dataclass(frozen=True)
class Shared:
    """The functions with which the processes of a job read a dataset together."""

    open_reader: Callable[[], Reader]
    make_assembler: Callable[[Any, int], Assembler]
    # Whether the dataset in this process determines the number of batches.
    is_countable: bool


def is_shared(layout: ReplicaMesh) -> bool:
    """Whether several processes own the replicas of a mesh, and no replica spans processes."""
    return not layout.is_local and not _has_spanning_replica(layout)


def _has_spanning_replica(layout: ReplicaMesh) -> bool:
    owners = [{layout.device_owners[d] for d in row} for row in layout.device_grid]
    return any(len(of_replica) > 1 for of_replica in owners)


@called(SPLIT_CALLER)
def check_policy(options: InputOptions, dataset: Any, layout: ReplicaMesh) -> AutoShardPolicy:
    """Return the policy for reading a dataset: DATA, FILE or OFF.

    Raises:
        ArgumentError: The policy in the options does not work with the dataset or the mesh.
    """
    given = options.auto_shard_policy
    if layout.is_local and given is None:
        return AutoShardPolicy.DATA
    num_files, rows = None, None
    if isinstance(dataset, Files):
        by_process = dict.fromkeys(sorted({*layout.replica_owners}), 0)
        parts = split_rows(dataset.batch_size, layout.num_replicas, balanced=options.balance_rows)
        for owner, part in zip(layout.replica_owners, parts, strict=True):
            by_process[owner] += part.stop - part.start
        num_files, rows = len(dataset.paths), tuple(by_process.values())
    if layout.is_local or not _has_spanning_replica(layout):
        return choose_policy(given, dataset, num_files, rows)
    if given in (None, AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        return AutoShardPolicy.DATA
    raise refuse(
        f"auto_shard_policy={given.name}, and a replica of the strategy has devices of several "
        "processes.",
        "All processes of a replica read the rows of that replica, so each reads every batch.",
        "Use AutoShardPolicy.DATA, or leave auto_shard_policy out.",
    )


def share_dataset(
    source: Source,
    policy: AutoShardPolicy,
    layout: ReplicaMesh,
    options: InputOptions,
    placer: Placer,
    drops: Drops,
    agreement: Agreement | None,
) -> Shared:
    """Return the functions with which the processes read a dataset of global batches."""
    partial = options.partial_batch
    same = {"partial_batch": partial.value, "policy": policy.name}
    same["balance_rows"] = str(placer.balanced)
    find = _Finder(SPLIT_CALLER, agreement, same, layout.timeout_seconds)
    num_replicas = layout.num_replicas
    dataset = source.dataset
    grain = find_grain_batches(dataset)
    is_own = isinstance(dataset, Batches) or grain is not None
    size = source.batch_size
    if grain is not None:
        size = min(grain.batch_size, len(grain.examples))

    @called(SPLIT_CALLER)
    def parts(rows: int) -> _Parts:
        fixed = FixedRows(num_replicas, rows)
        return ElementReader(), placer, num_replicas, partial, drops, fixed

    if policy is AutoShardPolicy.DATA:
        cut = _own_cut(layout, partial, size, balanced=placer.balanced)
        make = _make_own_pass(dataset, grain, source, cut) if is_own else None
        if not is_own and not source.is_in_memory:
            _LOG.info(
                "%s: every process reads whole batches of %r, and keeps the rows of its replicas. "
                "Of jaxdist.data.batches and Grain's map datasets with batch() it reads its own "
                "rows only; of jaxdist.data.from_files its own files.",
                SPLIT_CALLER,
                source,
            )

        def make_global(reader: ShareReader, rows: int) -> Assembler:
            exchange = find.exchange(reader, {"dataset": repr(source)}, is_needed=False)
            return GlobalAssembler(*parts(size or rows), SPLIT_CALLER, layout, exchange, is_own)

        return Shared(lambda: ShareReader(source.open(make)), make_global, is_countable=True)

    workers = sorted({*layout.replica_owners})
    part = (workers.index(layout.process.index), len(workers))
    if policy is AutoShardPolicy.OFF:

        def open_pieces() -> ShareReader:
            return ShareReader(PieceReader(source.open(), len(workers), size))
    else:
        quota = [placer.divide(size)[r] for r in layout.local_replicas]
        rows_of_step = sum(s.stop - s.start for s in quota)

        def open_pieces() -> ShareReader:
            return ShareReader(source.open(lambda: FilesIterator(dataset, rows_of_step, part)))

    def make_local(reader: ShareReader, rows: int) -> Assembler:
        exchange = find.exchange(reader, {"dataset": repr(source)}, is_needed=True)
        inner: Any = reader.inner
        pieces = inner if isinstance(inner, PieceReader) else inner.iterator
        # The first step decides the padding, which can differ from that of whole batches.
        return LocalAssembler(*parts(rows), SPLIT_CALLER, layout, exchange, pieces, size)

    return Shared(open_pieces, make_local, is_countable=False)


def share_function(
    sources: list[Source],
    layout: ReplicaMesh,
    options: InputOptions,
    placer: Placer,
    drops: Drops,
    devices: list[jax.Device | None],
    open_on: Callable[[Source, jax.Device | None], Any],
    agreement: Agreement | None,
) -> Shared:
    """Return the functions with which each process reads its own dataset."""
    is_per_replica, partial = options.is_per_replica, options.partial_batch
    same = {"partial_batch": partial.value}
    find = _Finder(GROUP_CALLER, agreement, same, layout.timeout_seconds)
    size = max(s.batch_size for s in sources)

    def open_reader() -> ShareReader:
        if not is_per_replica:
            count = len(layout.local_replicas)
            return ShareReader(GroupReader(sources[0].open(), count, placer.snapshot))
        readers = [open_on(s, d) for s, d in zip(sources, devices, strict=True)]
        return ShareReader(ParallelReader(readers, devices, placer.snapshot))

    @called(GROUP_CALLER)
    def make_grouper(reader: ShareReader, rows: int) -> Assembler:
        exchange = find.exchange(None, {}, is_needed=True)
        fixed = FixedRows(1, rows or size)
        read = ElementReader()
        parts = (read, placer, layout.num_replicas, partial, drops, fixed)
        return GroupAssembler(*parts, GROUP_CALLER, layout, exchange, is_per_replica)

    return Shared(open_reader, make_grouper, is_countable=False)


def number_pipelines(layout: ReplicaMesh) -> tuple[int, int]:
    """Return the number of input pipelines of a mesh, and the index of this process's pipeline.

    Each process has a pipeline. If a replica spans several processes, all share one pipeline and
    read the same data.
    """
    if not is_shared(layout):
        return 1, 0
    workers = sorted({*layout.replica_owners})
    return len(workers), workers.index(layout.process.index)


@dataclasses.dataclass(frozen=True)
class _Finder:
    """Makes the exchanges for the passes over one dataset."""

    caller: str
    agreement: Agreement | None
    same: dict[str, str]
    seconds: float | None

    @called(lambda self: self.caller)
    def exchange(
        self, reader: ShareReader | None, same: dict[str, str], *, is_needed: bool
    ) -> Exchange | None:
        """Return the exchange of a pass; None if the processes are not connected."""
        agreement = self.agreement or get_agreement()
        if agreement is None:
            if not is_needed:
                return None
            raise ContextError(
                f"{self.caller}: the processes of the strategy cannot agree on the rows of a step, "
                "since this process is not connected to the others.\n\n"
                "Each process reads data of its own, so they tell each other how much.\n\n"
                "Make a MultiWorkerMirroredStrategy, which connects them, in every process."
            )
        if self.agreement is None and not _HAS_CALLBACK:
            # Stop the threads before the service ends: one that waits for it would end the process.
            _HAS_CALLBACK.append(True)
            at_leaving(stop_all)
        position = None if reader is None else reader.position()
        shown = json.dumps(position, default=repr, sort_keys=True)
        where = {} if position is None else {"position": shown}
        return Exchange(agreement, {**self.same, **same, **where}, self.seconds)


def _own_cut(layout: ReplicaMesh, partial: PartialBatch, batch_size: int, *, balanced: bool) -> Cut:
    count = layout.num_replicas
    padded = round_up(batch_size, count) // count if partial is PartialBatch.PAD else 0

    def cut(total: int) -> list[slice]:
        slices = cut_evenly(total, count, padded, balanced=balanced)
        return [slices[r] for r in layout.local_replicas]

    return cut


def _make_own_pass(
    dataset: Any, grain: GrainBatches | None, source: Source, cut: Cut
) -> Callable[[], Any]:
    if grain is None:
        return lambda: OwnBatches(iter(dataset), cut)
    # Grain reads ahead in its own threads, with the positions of the original dataset.
    import grain as library

    own = grain.own(cut)
    return lambda: iter(library.MapDataset.source(own))
