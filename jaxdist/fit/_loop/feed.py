"""Reads the batches of each epoch."""

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxdist._called import called
from jaxdist._strategies import Strategy
from jaxdist._validate import ErrorNote, show
from jaxdist.data import Batches, DistributedDataset, InputOptions, PartialBatch
from jaxdist.errors import ArgumentError, ArgumentTypeError
from jaxdist.fit._callbacks.saving import Position
from jaxdist.fit._callbacks.states import join_state, split_state
from jaxdist.fit._loop.arguments import Examples
from jaxdist.fit._step.steps import PaddedBatch

_LOG = logging.getLogger("jaxdist")
# Read two ahead: one batch is copied to the devices while another one is read.
_AHEAD = 2


class Feed:
    """Batches of training, epoch by epoch.

    Args:
        strategy: Splits the batches over its replicas.
        source: Examples in memory, or a dataset of batches.
        batch_size: The size of a global batch, for examples in memory.
        shuffle: Whether each epoch has its own order, for examples in memory.
        seed: The seed of these orders.
        first_pass: The number of the first order: how many passes came before.
        steps: The number of batches of an epoch; None is a whole pass.
        epochs: The number of epochs that begin with this one.
        notes_positions: Whether `get_state` is called within an epoch.
        continues: The position of a resumed training; None begins a new pass.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: Any,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        first_pass: int,
        steps: int | None,
        epochs: int | None = None,
        notes_positions: bool = False,
        continues: Position | None = None,
    ) -> None:
        self._steps, self._notes_positions = steps, notes_positions
        self._continues = _choose_data(continues, source, steps)
        if self._continues is not None:
            # The last pass is opened again.
            first_pass -= 1
        self.passes = first_pass
        self._batches: Batches | None = None
        if isinstance(source, Examples):
            self._batches = source.make_batches(
                batch_size, shuffle=shuffle, seed=seed, first_epoch=first_pass
            )
            source = self._batches
        elif steps is not None and epochs is not None:
            source = limit_elements(source, self._count_needed(steps, epochs, continues))
        is_distributed = isinstance(source, DistributedDataset)
        self._is_padded = _needs_equal_rows(strategy) and _can_be_padded(source)
        options = _make_options(is_padded=self._is_padded)
        self._data: DistributedDataset = (
            source if is_distributed else strategy.experimental_distribute_dataset(source, options)
        )
        self._rest: Iterator[Any] | None = None
        # The current pass, how many of its batches were read, and the passes, batches and positions
        # after the last two batches.
        self._pass: Any = None
        self._count = self._count_of_epoch = 0
        self._last: deque[tuple[int, int, Any]] = deque(maxlen=2)

    def _count_needed(self, steps: int, epochs: int, continues: Position | None) -> int:
        """Return how many elements of an iterator are read in all epochs."""
        done = 0 if continues is None else continues.step
        skipped = 0
        if self._continues is not None and self._continues["position"] is None:
            skipped = self._continues["batches"]
        return max(steps * epochs - done, 0) + skipped

    def epoch(self, step: int = 0) -> Iterator[Any]:
        """Return the batches of the next epoch; those after `step` if it is resumed."""
        self._count_of_epoch = step
        data, self._continues = self._continues, None
        if data is not None:
            self._begin_pass()
            _skip(self._pass, data["batches"], data["position"])
            self._count = data["batches"]
        if self._steps is None:
            if step == 0:
                self._begin_pass()
            return self._read()
        if self._rest is None:
            self._rest = self._endless()
        return itertools.islice(self._rest, max(self._steps - step, 0))

    @called("fit.Model.fit", replaces="experimental_distribute_dataset")
    def _begin_pass(self) -> None:
        self._pass = iter(self._data)
        self.passes, self._count = self.passes + 1, 0

    def _read(self) -> Iterator[Any]:
        """Return the remaining batches of a pass."""
        batches = self._count_batches(self._pass)
        return itertools.starmap(PaddedBatch, batches) if self._is_padded else batches

    def _count_batches(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self._count += 1
            self._count_of_epoch += 1
            if self._notes_positions:
                self._last.append(self._position())
            yield batch

    def _endless(self) -> Iterator[Any]:
        is_first = self._pass is None
        while True:
            if is_first:
                self._begin_pass()
            is_first, before = True, self._count
            yield from self._read()
            if self._count == before == 0:
                return

    def _position(self) -> tuple[int, int, Any]:
        return self.passes, self._count, _get_position(self._pass)

    def get_state(self, step: int | None = None) -> tuple[int, Any]:
        """Return the number of passes, and the position after `step` or after the last batch."""
        if step is None:
            passes, count, position = self._position()
        else:
            # A dispatch of several steps may have read one batch more.
            passes, count, position = self._last[step - self._count_of_epoch - 1]
        return passes, {"batches": count, "position": position}

    def check_not_empty(self, count: int, epoch: int, resumed: int = 0) -> None:
        """Raise if an epoch had no batches, or fewer than requested.

        Args:
            count: The number of its batches.
            epoch: The epoch, from 0.
            resumed: How many of these were read before the training was resumed.
        """
        if count > resumed and (self._steps is None or count == self._steps):
            return
        wanted = "a batch" if self._steps is None else f"{self._steps} batches"
        if resumed:
            raise ArgumentError(
                f"fit.Model.fit was resumed after {resumed} batches of epoch {epoch + 1}, and read "
                f"{count - resumed} more.\n\n"
                f"A training resumes with the data that it began with; an epoch has {wanted}.\n\n"
                "Pass the same data, and the same batch_size and steps_per_epoch."
            )
        raise ArgumentError(
            f"fit.Model.fit read {count} batch(es) in epoch {epoch + 1}.\n\n"
            f"An epoch has {wanted}. A generator can be read only once.\n\n"
            "Pass arrays, a list of batches, data.batches(...), or a dataset that starts again at "
            "each iter()."
        )

    def describe_batch(self, step: int) -> str:
        """Describe the examples of a step of the last epoch."""
        if self._batches is None or self._steps is not None:
            return "The dataset does not say which examples they were."
        size = self._batches.batch_size
        rows = range(step * size, min((step + 1) * size, self._batches.num_examples))
        order = self._batches.order(self.passes - 1)
        indices = list(rows) if order is None else order[rows.start : rows.stop].tolist()
        return f"Its batch has the examples {show(indices) if len(indices) > 64 else indices}."


def count_steps(source: Any, batch_size: int, steps: int | None) -> int | None:
    """Return the number of batches of an epoch, or None if it is unknown."""
    if steps is None and isinstance(source, Examples):
        return -(-source.count // batch_size)
    return steps


def _choose_data(continues: Position | None, source: Any, steps: int | None) -> Any:
    """Return the position of a resumed training in its last pass; None to begin a new pass."""
    if continues is None or continues.data is None:
        return None
    is_between = continues.step == 0 and steps is None
    # The order of examples in memory follows from the number of the pass. A dataset without a
    # position is read from the beginning again.
    is_known = isinstance(source, Examples) or continues.data["position"] is None
    return None if is_between and is_known else continues.data


def _get_position(batches: Any) -> Any:
    """Return the position of a pass as JSON; None if it has none."""
    arrays: list[Any] = []
    try:
        position = split_state("The dataset", batches.get_state(), arrays)
    except ArgumentTypeError:
        return None
    return None if arrays else position


def _skip(batches: Any, count: int, position: Any) -> None:
    """Continue a pass after a number of batches."""
    if position is not None:
        with ErrorNote(
            "fit.Model.fit continues within an epoch, where its checkpoint says. To train on other "
            "data, choose another directory."
        ):
            batches.set_state(join_state(position, ()))
        return
    _LOG.info(
        "fit reads %d batches without training on them: the dataset has no get_state and set_state",
        count,
    )
    found = sum(1 for _ in itertools.islice(batches, count))
    if found < count:
        raise ArgumentError(
            f"fit.Model.fit continues after {count} batches of the dataset, which has {found}.\n\n"
            "A training resumes with the dataset that it began with.\n\n"
            "Pass the same dataset, or give its iterator get_state() and set_state(state)."
        )


class _Limited(Iterator[Any]):
    """The next elements of an iterator of the user, and no more.

    Datasets read ahead. What is read ahead of an iterator that yields its elements only once would
    be lost for the next call with it.
    """

    def __init__(self, source: Iterator[Any], count: int) -> None:
        self._source, self._left = source, count

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        return next(self._source)


class _LimitedWithState(_Limited):
    """The same, of an iterator with positions. The count is that of the elements after a seek."""

    def get_state(self) -> Any:
        return cast(Any, self._source).get_state()

    def set_state(self, state: Any) -> None:
        cast(Any, self._source).set_state(state)


def limit_elements(source: Any, count: int | None) -> Any:
    """Return a dataset of at most `count` elements if `source` can be read only once."""
    is_one_shot = isinstance(source, Iterator) and iter(source) is source
    if count is None or not is_one_shot:
        return source
    has_state = hasattr(source, "get_state") and hasattr(source, "set_state")
    kind: type[_Limited] = _LimitedWithState if has_state else _Limited
    # Errors name the class of the dataset.
    named = type(type(source).__name__, (kind,), {})
    return named(source, count)


def _needs_equal_rows(strategy: Strategy) -> bool:
    """Whether all replicas run one program, so that the last batch has to be padded."""
    layout = strategy.layout
    return layout.num_logical > 1 or layout.num_virtual is not None


def _can_be_padded(source: Any) -> bool:
    """Whether all batches can be padded to the size of the first: none is larger."""
    if isinstance(source, Batches):
        return True
    if not isinstance(source, (list, tuple)):
        return False
    rows = [jnp.shape(leaf)[:1] for batch in source for leaf in jax.tree.leaves(batch)[:1]]
    return bool(rows) and rows[0] == max(rows)


def distribute_padded(strategy: Strategy, source: Any, batch_size: int) -> Iterable[Any]:
    """Return `(batch, mask)` for evaluation; all batches have one size, so one program runs.

    The mask is None for a distributed dataset, whose batches are divided already, and for a list
    of batches whose first one is not the largest.
    """
    if isinstance(source, Examples):
        source = source.make_batches(batch_size)
    if isinstance(source, (list, tuple)) and not _can_be_padded(source):
        source = strategy.experimental_distribute_dataset(source, _make_options(is_padded=False))
    if isinstance(source, DistributedDataset):
        return ((batch, None) for batch in source)
    return strategy.experimental_distribute_dataset(source, _make_options(is_padded=True))


def _make_options(*, is_padded: bool) -> InputOptions:
    return InputOptions(
        experimental_per_replica_buffer_size=_AHEAD,
        partial_batch=PartialBatch.PAD if is_padded else PartialBatch.UNEVEN,
        balance_rows=True,
    )
