"""Makes the readers and assemblers with which several processes read a dataset, by policy."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxdist._called import called, name_call, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement, at_leaving, get_agreement
from jaxdist.data._assembler import Assembler
from jaxdist.data._options import InputOptions
from jaxdist.data._place import FixedRows, Placer
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
from jaxdist.data._reading.readers import Reader
from jaxdist.data._reading.shard_policy import AutoShardPolicy, choose_policy
from jaxdist.data._reading.sources import Source
from jaxdist.data._sharing.exchange import Exchange
from jaxdist.data._sharing.share import (
    Cut,
    GrainBatches,
    OwnBatches,
    OwnGrainRows,
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
    same |= {"balance_rows": str(placer.balanced), "dataset": repr(source)}
    find = functools.partial(_find_exchange, agreement, same, layout.timeout_seconds)
    num_replicas = layout.num_replicas
    dataset = source.dataset
    grain = find_grain_batches(dataset)
    is_own = isinstance(dataset, Batches) or grain is not None
    size = source.batch_size
    if grain is not None:
        size = min(grain.batch_size, len(grain.examples))

    def parts(rows: int) -> _Parts:
        fixed = FixedRows(num_replicas, rows)
        return ElementReader(), placer, num_replicas, partial, drops, fixed

    if policy is AutoShardPolicy.DATA:
        cut = _own_cut(layout, partial, size, balanced=placer.balanced)
        make = _make_own_pass(dataset, grain, source, cut) if is_own else None
        if not is_own and not source.is_in_memory:
            _LOG.info(
                "%s: every process reads whole batches of %r, and keeps the rows of its replicas. "
                "From jaxdist.data.batches and Grain's map datasets with batch() it reads only its "
                "own rows; from jaxdist.data.from_files, only its own files.",
                SPLIT_CALLER,
                source,
            )

        @called(SPLIT_CALLER)
        def make_global(reader: ShareReader, rows: int) -> Assembler:
            exchange = find(reader, is_needed=False)
            return GlobalAssembler(*parts(size or rows), layout, exchange, is_own)

        return Shared(lambda: ShareReader(source.open(make)), make_global, is_countable=True)

    num_pipelines, own_pipeline = number_pipelines(layout)
    if policy is AutoShardPolicy.OFF:

        def open_pieces() -> ShareReader:
            return ShareReader(PieceReader(source.open(), num_pipelines, size))
    else:
        quota = [placer.divide(size)[r] for r in layout.local_replicas]
        rows_of_step = sum(s.stop - s.start for s in quota)

        part = (own_pipeline, num_pipelines)

        def open_pieces() -> ShareReader:
            return ShareReader(source.open(lambda: FilesIterator(dataset, rows_of_step, part)))

    @called(SPLIT_CALLER)
    def make_local(reader: ShareReader, rows: int) -> Assembler:
        exchange = find(reader, is_needed=True)
        inner: Any = reader.inner
        pieces = inner if isinstance(inner, PieceReader) else inner.iterator
        # The first step decides the padding, which can differ from that of whole batches.
        return LocalAssembler(*parts(rows), layout, exchange, pieces, size)

    return Shared(open_pieces, make_local, is_countable=False)


def share_function(
    open_reader: Callable[[], Reader],
    batch_size: int,
    layout: ReplicaMesh,
    options: InputOptions,
    placer: Placer,
    drops: Drops,
    agreement: Agreement | None,
) -> Shared:
    """Return the functions with which each process reads its own dataset."""
    partial = options.partial_batch
    same = {"partial_batch": partial.value}

    @called(GROUP_CALLER)
    def make_grouper(reader: ShareReader, rows: int) -> Assembler:
        exchange = _find_exchange(agreement, same, layout.timeout_seconds, None, is_needed=True)
        fixed = FixedRows(1, rows or batch_size)
        parts = (ElementReader(), placer, layout.num_replicas, partial, drops, fixed)
        return GroupAssembler(*parts, layout, exchange, options.is_per_replica)

    return Shared(lambda: ShareReader(open_reader()), make_grouper, is_countable=False)


def number_pipelines(layout: ReplicaMesh) -> tuple[int, int]:
    """Return the number of input pipelines of a mesh, and the index of this process's pipeline.

    Each process has a pipeline. If a replica spans several processes, all share one pipeline and
    read the same data.
    """
    if not is_shared(layout):
        return 1, 0
    workers = sorted({*layout.replica_owners})
    return len(workers), workers.index(layout.process.index)


def _find_exchange(
    given: Agreement | None,
    same: dict[str, str],
    seconds: float | None,
    reader: ShareReader | None,
    *,
    is_needed: bool,
) -> Exchange | None:
    """Return the exchange of a pass; None if the processes are not connected."""
    agreement = given or get_agreement()
    if agreement is None:
        if not is_needed:
            return None
        raise ContextError(
            f"{name_call()}: the processes of the strategy cannot agree on the rows of a step, "
            "since this process is not connected to the others.\n\n"
            "Each process reads its own data, so they tell each other how many rows they have."
            "\n\nCreate a MultiWorkerMirroredStrategy, which connects them, in every process."
        )
    if given is None and not _HAS_CALLBACK:
        # Stop the threads before the service ends: one that waits for it would end the process.
        _HAS_CALLBACK.append(True)
        at_leaving(stop_all)
    position = None if reader is None else reader.position()
    shown = json.dumps(position, default=repr, sort_keys=True)
    where = {} if position is None else {"position": shown}
    return Exchange(agreement, {**same, **where}, seconds)


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
        return lambda: OwnBatches(dataset, cut)
    # Grain reads ahead in its own threads, with the positions of the original dataset.
    import grain as library

    own = OwnGrainRows(grain, cut)
    return lambda: iter(library.MapDataset.source(own))
