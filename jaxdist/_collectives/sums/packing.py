"""Which pieces of which leaves are reduced as one vector."""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some of the elements of a leaf, in its flat order."""

    leaf: int
    start: int
    stop: int


class Packing(abc.ABC):
    """A rule by which leaves become vectors; dtypes are never mixed in one."""

    @abc.abstractmethod
    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """The pieces of each vector. Every element of every leaf is in one of them."""

    def packed(self, leaves: Sequence[jax.Array]) -> "Packed":
        """The vectors of `leaves`."""
        packs = self.packs(leaves)
        return Packed(tuple(leaves), packs, [_joined(leaves, pack) for pack in packs])


@dataclasses.dataclass(frozen=True)
class Packed:
    """Vectors, and where they come from."""

    leaves: tuple[Any, ...]
    packs: list[list[Piece]]
    vectors: list[jax.Array]

    def unpacked(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Leaves made of other vectors of the same sizes."""
        found: dict[int, list[tuple[int, jax.Array]]] = {}
        for pack, vector in zip(self.packs, vectors, strict=True):
            end = 0
            for piece in pack:
                start, end = end, end + piece.stop - piece.start
                own = vector if end - start == vector.size else vector[start:end]
                found.setdefault(piece.leaf, []).append((piece.start, own))
        return [self._leaf(i, found.get(i, [])) for i in range(len(self.leaves))]

    def _leaf(self, number: int, parts: list[tuple[int, jax.Array]]) -> jax.Array:
        like = self.leaves[number]
        if not parts:
            return jnp.zeros(like.shape, like.dtype)
        ordered = [part for _, part in sorted(parts, key=lambda p: p[0])]
        flat = ordered[0] if len(ordered) == 1 else jnp.concatenate(ordered)
        return flat.reshape(like.shape)


def _joined(leaves: Sequence[jax.Array], pack: Sequence[Piece]) -> jax.Array:
    flat = []
    for piece in pack:
        whole = leaves[piece.leaf].ravel()
        all_of_it = piece.stop - piece.start == whole.size
        flat.append(whole if all_of_it else whole[piece.start : piece.stop])
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


@dataclasses.dataclass(frozen=True)
class Alone(Packing):
    """Every leaf by itself."""

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """One vector for each leaf that has elements."""
        return [[_all_of(i, x)] for i, x in enumerate(leaves) if x.size]


@dataclasses.dataclass(frozen=True)
class EqualPacks(Packing):
    """All leaves of one dtype end to end, cut into `count` pieces; the last has what is over."""

    count: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """At most `count` vectors for each dtype."""
        return [p for numbers in by_dtype(leaves) for p in self._cut(leaves, numbers)]

    def _cut(self, leaves: Sequence[Any], numbers: Sequence[int]) -> Iterator[list[Piece]]:
        total = sum(leaves[i].size for i in numbers)
        size = total // self.count
        cuts = [size * k for k in range(1, self.count)] + [total] if size else [total]
        place = 0
        todo = [_all_of(i, leaves[i]) for i in numbers if leaves[i].size]
        for cut in cuts:
            pack: list[Piece] = []
            while todo and place < cut:
                piece = todo.pop(0)
                stop = min(piece.stop, piece.start + cut - place)
                pack.append(Piece(piece.leaf, piece.start, stop))
                place += stop - piece.start
                if stop < piece.stop:
                    todo.insert(0, Piece(piece.leaf, stop, piece.stop))
            if pack:
                yield pack


@dataclasses.dataclass(frozen=True)
class SmallInRuns(Packing):
    """Small leaves that follow one another share a vector; the others are by themselves.

    Args:
        max_bytes: The largest leaf that counts as small.
        max_group: The most leaves in a vector.
    """

    max_bytes: int
    max_group: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """A vector for each run of small leaves of one dtype, and for each other leaf."""

        def kind(number: int) -> Any:
            leaf = leaves[number]
            is_small = leaf.size * leaf.dtype.itemsize <= self.max_bytes
            return str(leaf.dtype) if is_small else number

        found: list[list[Piece]] = []
        for _, run in itertools.groupby(range(len(leaves)), key=kind):
            pieces = [_all_of(i, leaves[i]) for i in run if leaves[i].size]
            found += [pieces[i : i + self.max_group] for i in range(0, len(pieces), self.max_group)]
        return found


@dataclasses.dataclass(frozen=True)
class SmallTogether(Packing):
    """All small leaves of one dtype share vectors, the last leaf first; the others are alone.

    Args:
        below: The size in bytes from which a leaf is by itself.
        limit: The size in bytes at which a vector is closed.
    """

    below: int
    limit: int

    def packs(self, leaves: Sequence[Any]) -> list[list[Piece]]:
        """The leaves in the order in which backpropagation makes their gradients."""
        found: list[list[Piece]] = []
        open_: dict[str, tuple[list[Piece], int]] = {}
        for i in reversed(range(len(leaves))):
            leaf = leaves[i]
            size = leaf.size * leaf.dtype.itemsize
            if not size:
                continue
            if size >= self.below:
                found.append([_all_of(i, leaf)])
                continue
            pack, filled = open_.get(str(leaf.dtype), ([], self.limit))
            if filled + size > self.limit:
                pack, filled = list[Piece](), 0
                found.append(pack)
            pack.append(_all_of(i, leaf))
            open_[str(leaf.dtype)] = (pack, filled + size)
        return found


def by_dtype(leaves: Sequence[Any]) -> list[list[int]]:
    """The numbers of the leaves of each dtype."""
    found: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(str(leaf.dtype), []).append(i)
    return list(found.values())


def _all_of(number: int, leaf: Any) -> Piece:
    return Piece(number, 0, int(leaf.size))
