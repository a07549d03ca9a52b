"""One call of a compiled function, and the batches that it takes from its iterator arguments."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._processes import get_agreement
from jaxdist._program.arguments.arguments import Flat, Static
from jaxdist._program.nnx.graph import CachedGraph, GraphShape
from jaxdist._values import BatchSource, Origin, PerReplica, is_per_replica
from jaxdist.errors import ContextError, InputContextError, OutOfRangeError

# A function that takes more batches in one call contains a loop over the data. JAX would unroll it.
MAX_BATCHES = 100


@dataclasses.dataclass(frozen=True)
class IteratorAt:
    """A placeholder for an iterator argument. Another iterator there uses the same program."""

    number: int


class UnevenBatchError(BaseException):
    """The replicas have different shapes, so the function cannot be compiled. Internal.

    It is not an `Exception`, so that `except Exception` in a user's function does not catch it.
    """


class Draws:
    """The batches of a call, by iterator. They are taken before the call or during its trace."""

    def __init__(self, name: str, sources: Sequence[BatchSource]) -> None:
        self._name = name
        self._sources = sources
        self._before = [source.position() for source in sources]
        self._after: list[list[Any]] = [[] for _ in sources]  # the position after each batch
        self.batches: list[list[Any]] = [[] for _ in sources]
        # The number of batches that the trace took from each iterator.
        self.used = [0] * len(sources)

    def insert_iterators(self, slots: Sequence[Any]) -> tuple[Any, ...]:
        """Return the slots of the arguments with the iterators put back."""
        sources = self._sources
        return tuple(Static(sources[s.number]) if isinstance(s, IteratorAt) else s for s in slots)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of batches taken from each iterator."""
        return tuple(map(len, self.batches))

    def take(self, counts: Sequence[int]) -> None:
        """Take these numbers of batches from the iterators."""
        for number, count in enumerate(counts):
            for _ in range(count):
                self._take(number)

    def put_back(self) -> None:
        """Return all batches to their iterators."""
        for number, source in enumerate(self._sources):
            taken = list(zip(self.batches[number], self._after[number], strict=True))
            source.put_back(taken, self._before[number])
        for held in (*self.batches, *self._after):
            held.clear()

    def begin_trace(self) -> None:
        """Let `next_batch` start again with the first batches."""
        self.used = [0] * len(self._sources)

    def next_batch(self, source: Any) -> tuple[int, int, Any]:
        """Return the next batch of an iterator while the function is traced.

        Returns:
            The number of the iterator, the number of the batch, and the batch.
        """
        number = next((i for i, f in enumerate(self._sources) if f is source), None)
        if number is None:
            raise InputContextError(
                f"next() was called in {self._name} on an iterator that it was not given.\n\n"
                "The function is traced once, and has to take a new batch at each call.\n\n"
                "Pass the iterator to it, train_step(iterator), or the batch: "
                "train_step(next(iterator))."
            )
        # A second trace of the same call gets the same batches as the first one.
        used, self.used[number] = self.used[number], self.used[number] + 1
        if used == len(self.batches[number]):
            self._take(number)
        return number, used, self.batches[number][used]

    def give_back_unused(self) -> None:
        """Return the batches that the trace did not use to their iterators."""
        used = tuple(self.used)
        # `put_back` restores the position before the first batch, so take the used ones again.
        if used != self.counts:
            self.put_back()
            self.take(used)

    def make_ended_error(self) -> OutOfRangeError:
        """Return the error for data that ends in a call which ran as plain Python."""
        return OutOfRangeError(
            f"{self._name} asks for another batch, and the dataset has ended.\n\n"
            "A batch of this call has different shapes on the replicas, so the function ran as "
            "plain Python: its steps before the end have used their batches.\n\n"
            "Call it as often as there are batches, or loop outside: for batch in dataset."
        )

    def _take(self, number: int) -> None:
        taken = self.batches[number]
        if len(taken) == MAX_BATCHES:
            raise ContextError(
                f"{self._name} takes more than {MAX_BATCHES} batches in one call.\n\n"
                "A loop over a dataset in a function is unrolled into one program.\n\n"
                "Loop outside: for batch in dataset: train_step(batch)."
            )
        try:
            batch = self._sources[number].take()
        except StopIteration:
            raise OutOfRangeError(
                f"{self._name} asks for {len(taken) + 1} batch(es) in a call, and the dataset has "
                f"ended: {len(taken)} were left, and were put back.\n\n"
                "A call needs all its batches, since its program has a fixed number of them.\n\n"
                "Call it as often as there are batches, or loop outside: for batch in dataset."
            ) from None
        taken.append(batch)
        self._after[number].append(self._sources[number].position())
        # The caller then runs the Python function, whose steps can be uneven.
        if any(map(is_uneven, jax.tree.leaves(batch, is_leaf=is_per_replica))):
            raise UnevenBatchError


def take_iterators_out(name: str, flat: Flat) -> tuple[Flat, Draws]:
    """Return a call with placeholders for its iterators, and the batches that it will take."""
    sources: list[BatchSource] = []
    slots: list[Any] = []
    for slot in flat.slots:
        if isinstance(slot, Static) and isinstance(slot.value, BatchSource):
            number = next((i for i, f in enumerate(sources) if f is slot.value), len(sources))
            if number == len(sources):
                sources.append(slot.value)
            slot = IteratorAt(number)
        slots.append(slot)
    if not sources:
        return flat, NO_DRAWS
    return dataclasses.replace(flat, slots=tuple(slots)), Draws(
        f"{name} (jaxdist.function)", sources
    )


NO_DRAWS = Draws("a jaxdist.function", ())
_DRAWS: ContextVar[Draws] = ContextVar("jaxdist_draws", default=NO_DRAWS)
# A context variable, because `jax.jit` may start the trace in any call.
current_draws = _DRAWS.get


def serve(draws: Draws) -> contextlib.AbstractContextManager[None]:
    """Return a context in which traces take their batches from `draws`."""
    return _NOTHING if draws is NO_DRAWS else _serve(draws)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _serve(draws: Draws) -> Iterator[None]:
    with _compat.set_in_block(_DRAWS, draws):
        draws.begin_trace()
        yield


def shapes_of(values: Any) -> tuple[Any, ...]:
    """Return the structure, shapes and dtypes of a pytree of arrays."""
    leaves, treedef = jax.tree.flatten(values)
    return treedef, tuple((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves)


def is_uneven(leaf: Any) -> bool:
    """Whether the replicas' values have different shapes, or may have in other processes."""
    if not isinstance(leaf, PerReplica) or leaf.is_global:
        return False
    # This process has only its own values, and a trace needs those of all.
    if get_agreement() is not None:
        return True
    return len({jax.numpy.shape(v) for v in leaf.values}) > 1


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """The arguments of a call, its NNX objects, and its batches."""

    flat: Flat
    graph: CachedGraph | None
    draws: Draws

    @property
    def shape(self) -> GraphShape | None:
        """The shape of the NNX objects."""
        return self.graph.shape if self.graph else None

    def placements(self) -> Any:
        """Return the part of the program's key that is not the structure of the call.

        The placements of all arrays, and the shapes of batches.
        """
        batches = self.draws.batches
        origins = origins_of((self.flat.dynamic, batches))
        return (origins, shapes_of(batches)) if batches else origins


def origins_of(values: Any) -> tuple[Origin, ...]:
    """Return the placements of all arrays of a pytree."""
    return tuple(map(origin_of_value, jax.tree.leaves(values)))


def origin_of_value(leaf: Any) -> Origin:
    """Return the placement of an array. Host arrays have none."""
    if not isinstance(leaf, jax.Array):
        return _NOWHERE
    # The program does not depend on which single device it is.
    sharding = leaf.sharding
    # With virtual replicas a sharding names mesh axes even on one device.
    names_axes = isinstance(sharding, NamedSharding) and any(sharding.spec)
    if len(sharding.device_set) == 1 and not names_axes:
        return _ON_ONE_DEVICE
    return Origin(sharding, _compat.is_committed(leaf))


_NOWHERE = Origin(None, False)
_ON_ONE_DEVICE = Origin(None, True)
