"""The rules by which leaves, or pieces of leaves, are reduced as one vector."""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Algorithm, ReplicaGroups
from jaxdist._collectives.marks import order_after


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of the elements of a leaf, in its flat order."""

    leaf: int
    start: int
    stop: int


class Packing(abc.ABC):
    """A rule that puts leaves into vectors. Each vector has one dtype."""

    @abc.abstractmethod
    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """Return the pieces of each vector. Every element of every leaf is in one piece."""


def unpack(
    leaves: Sequence[Any], packs: Sequence[Sequence[Piece]], vectors: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return arrays like `leaves` whose pieces are those of the vectors, one for each pack."""
    found: list[dict[int, jax.Array]] = [{} for _ in leaves]
    for pack, vector in zip(packs, vectors, strict=True):
        # One operation for all pieces, and `lax` instead of `jnp`: JAX traces them faster.
        own = jax.lax.split(vector, [piece.stop - piece.start for piece in pack])
        for piece, part in zip(pack, own, strict=True):
            found[piece.leaf][piece.start] = part
    # A leaf without elements has no piece.
    return [
        jax.lax.reshape(_join([parts[start] for start in sorted(parts)]), like.shape)
        if parts
        else jnp.zeros(like.shape, like.dtype)
        for like, parts in zip(leaves, found, strict=True)
    ]


def concatenate_pieces(leaves: Sequence[jax.Array], pack: Sequence[Piece]) -> jax.Array:
    """Return the pieces of a pack as one vector."""
    flat = []
    for piece in pack:
        leaf = leaves[piece.leaf]
        whole = jax.lax.reshape(leaf, (leaf.size,))
        all_of_it = piece.stop - piece.start == leaf.size
        flat.append(whole if all_of_it else jax.lax.slice(whole, (piece.start,), (piece.stop,)))
    return _join(flat)


def _join(vectors: list[jax.Array]) -> jax.Array:
    return vectors[0] if len(vectors) == 1 else jax.lax.concatenate(vectors, 0)


@dataclasses.dataclass(frozen=True)
class Alone(Packing):
    """Packing of every leaf into a vector of its own."""

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """Return one vector for each leaf that has elements."""
        return [[_whole_leaf(i, x)] for i, x in enumerate(leaves) if x.size]


@dataclasses.dataclass(frozen=True)
class EqualPacks(Packing):
    """All leaves of one dtype end to end, divided into `count` vectors; the last one is longest."""

    count: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """Return at most `count` vectors for each dtype."""
        return [p for numbers in group_by_dtype(leaves) for p in self._split(leaves, numbers)]

    def _split(self, leaves: Sequence[Any], numbers: Sequence[int]) -> Iterator[list[Piece]]:
        """Yield the pieces of each vector of one dtype."""
        total = sum(leaves[i].size for i in numbers)
        size = total // self.count
        # With fewer elements than packs, `size` is 0, and all elements share one vector.
        cuts = [size * k for k in range(1, self.count)] + [total] if size else [total]
        ends = list(itertools.accumulate(leaves[i].size for i in numbers))
        ranges = list(zip(numbers, [0, *ends], ends, strict=False))
        for first, last in itertools.pairwise([0, *cuts]):
            pack = [
                Piece(i, max(first, start) - start, min(last, end) - start)
                for i, start, end in ranges
                if max(first, start) < min(last, end)
            ]
            if pack:
                yield pack


@dataclasses.dataclass(frozen=True)
class SmallInRuns(Packing):
    """Neighbouring small leaves share a vector; every other leaf has its own.

    Args:
        max_bytes: The largest leaf that counts as small.
        max_group: The most leaves in a vector.
    """

    max_bytes: int
    max_group: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """Return a vector for each run of small leaves of one dtype, and for each other leaf."""

        def kind(number: int) -> Any:
            leaf = leaves[number]
            is_small = leaf.size * leaf.dtype.itemsize <= self.max_bytes
            # The number is a key that no other leaf has, so `groupby` leaves a large leaf alone.
            return str(leaf.dtype) if is_small else number

        found: list[list[Piece]] = []
        for _, run in itertools.groupby(range(len(leaves)), key=kind):
            pieces = [_whole_leaf(i, leaves[i]) for i in run if leaves[i].size]
            found += [pieces[i : i + self.max_group] for i in range(0, len(pieces), self.max_group)]
        return found


@dataclasses.dataclass(frozen=True)
class SmallTogether(Packing):
    """All small leaves of one dtype share vectors, the last leaf first; others have their own.

    Args:
        below: The size in bytes from which a leaf has its own vector.
        limit: The size in bytes at which a vector is closed.
    """

    below: int
    limit: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """Return the packs in the order in which backpropagation computes the gradients."""
        found: list[list[Piece]] = []
        open_: dict[str, tuple[list[Piece], int]] = {}
        for i in reversed(range(len(leaves))):
            leaf = leaves[i]
            size = leaf.size * leaf.dtype.itemsize
            if not size:
                continue
            if size >= self.below:
                found.append([_whole_leaf(i, leaf)])
                continue
            # The default counts as full, so the first leaf of a dtype opens a vector.
            pack, filled = open_.get(str(leaf.dtype), ([], self.limit))
            if filled + size > self.limit:
                pack, filled = list[Piece](), 0
                found.append(pack)
            pack.append(_whole_leaf(i, leaf))
            open_[str(leaf.dtype)] = (pack, filled + size)
        return found


def group_by_dtype(leaves: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the leaves of each dtype."""
    found: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(str(leaf.dtype), []).append(i)
    return list(found.values())


def _whole_leaf(number: int, leaf: Any) -> Piece:
    """Return the piece that is the whole leaf."""
    return Piece(number, 0, int(leaf.size))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The algorithm for leaves of up to `limit` bytes; -1 means no limit.

    It runs as `shards` all-reduces at the same time, each of one shard of the vector. Each lists
    the replicas from another first member. So several devices share the work of a reduction at one
    device, and XLA does not combine the all-reduces. With more shards than replicas, a shard waits
    for an earlier one. See Note [Collectives that stay apart].
    """

    algorithm: Algorithm
    shards: int = 1
    limit: int = -1

    def can_take(self, leaf: Any) -> bool:
        """Whether a leaf is small enough."""
        return self.limit < 0 or leaf.size * leaf.dtype.itemsize <= self.limit

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum over the group, `[size]`."""
        # No shard may be empty, because JAX cannot lower some collectives without elements.
        count = min(self.shards, max(vector.size, 1))
        ends = [vector.size * (i + 1) // count for i in range(count)]
        shards = [vector[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        sums: list[jax.Array] = []
        for i, shard in enumerate(shards):
            # There are only as many rotations as replicas. Beyond them two shards have equal
            # groups, and XLA would combine them.
            if i >= level.size:
                (shard,) = order_after([sums[i - level.size]], [shard])
            sums.append(self.algorithm.all_reduce(shard, self.algorithm.rotate(level, i)))
        return sums[0] if count == 1 else jnp.concatenate(sums)


@dataclasses.dataclass(frozen=True)
class SumBySize:
    """A sum that gives each leaf to the first entry that takes it.

    The leaves of each entry are packed and summed. The results have the order of the leaves.
    """

    level: ReplicaGroups
    entries: tuple[Entry, ...]
    packing: Packing = dataclasses.field(default_factory=Alone)
    apart: bool = False  # each vector waits for the one before, or XLA would combine them

    def __call__(self, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Return the sums, on every replica."""
        results: list[Any] = list(arrays)
        left = list(range(len(arrays)))
        for entry in self.entries:
            mine = [i for i in left if entry.can_take(arrays[i])]
            left = [i for i in left if i not in set(mine)]
            leaves = [arrays[i] for i in mine]
            packs = self.packing.packs(leaves)
            sums: list[jax.Array] = []
            for vector in [concatenate_pieces(leaves, pack) for pack in packs]:
                # See Note [Collectives that stay apart].
                own = order_after(sums[-1:], [vector])[0] if self.apart and sums else vector
                sums.append(entry.all_reduce(own, self.level))
            for i, total in zip(mine, unpack(leaves, packs, sums), strict=True):
                results[i] = total
        return results
