"""The batches of each epoch."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._strategies import Strategy
from jaxdist._validate import CallerRename, show
from jaxdist.data import Batches, DistributedDataset, InputOptions, PartialBatch
from jaxdist.errors import ArgumentError
from jaxdist.fit._loop.arguments import Examples
from jaxdist.fit._step.steps import PaddedBatch

# Reading ahead by two: one batch is copied to the devices while another one is read.
_AHEAD = 2


class Feed:
    """Batches of training, epoch by epoch.

    Args:
        strategy: Splits the batches over its replicas.
        source: Examples in memory, or a dataset of batches.
        batch_size: The size of a global batch, for examples in memory.
        shuffle: Whether each epoch has its own order, for examples in memory.
        seed: The seed of these orders.
        first_pass: The number of the first order: that of the passes before.
        steps: The number of batches of an epoch; None is a whole pass.
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
    ) -> None:
        self.passes, self._steps = first_pass, steps
        self._batches: Batches | None = None
        if isinstance(source, Examples):
            self._batches = source.make_batches(
                batch_size, shuffle=shuffle, seed=seed, first_epoch=first_pass
            )
            source = self._batches
        is_distributed = isinstance(source, DistributedDataset)
        self._is_padded = _needs_equal_rows(strategy) and _can_be_padded(source)
        options = InputOptions(
            experimental_per_replica_buffer_size=_AHEAD,
            partial_batch=PartialBatch.PAD if self._is_padded else PartialBatch.UNEVEN,
            balance_rows=True,
        )
        self._data: DistributedDataset = (
            source if is_distributed else strategy.experimental_distribute_dataset(source, options)
        )
        self._rest: Iterator[Any] | None = None

    @property
    def num_steps(self) -> int | None:
        """The number of batches of an epoch, or None if it is unknown."""
        if self._steps is not None:
            return self._steps
        return None if self._batches is None else self._batches.batches_per_epoch

    def epoch(self) -> Iterator[Any]:
        """Return the batches of the next epoch."""
        if self._steps is None:
            self.passes += 1
            with CallerRename("experimental_distribute_dataset", "fit.Model.fit"):
                return self._iterate()
        if self._rest is None:
            self._rest = self._endless()
        return itertools.islice(self._rest, self._steps)

    def _iterate(self) -> Iterator[Any]:
        batches = iter(self._data)
        return itertools.starmap(PaddedBatch, batches) if self._is_padded else batches

    def _endless(self) -> Iterator[Any]:
        while True:
            self.passes += 1
            is_empty = True
            for batch in self._iterate():
                is_empty = False
                yield batch
            if is_empty:
                return

    def check_not_empty(self, count: int, epoch: int) -> None:
        """Raise if an epoch had no batches, or fewer than asked for."""
        if count and (self._steps is None or count == self._steps):
            return
        wanted = "a batch" if self._steps is None else f"{self._steps} batches"
        raise ArgumentError(
            f"fit.Model.fit read {count} batch(es) in epoch {epoch + 1}.\n\n"
            f"An epoch has {wanted}. A generator can be read only once.\n\n"
            "Pass arrays, a list of batches, data.batches(...), or a dataset that starts again at "
            "each iter()."
        )

    def describe_batch(self, step: int) -> str:
        """Say which examples a step of the last epoch had."""
        if self._batches is None or self._steps is not None:
            return "The dataset does not say which examples they were."
        size = self._batches.batch_size
        rows = range(step * size, min((step + 1) * size, self._batches.num_examples))
        order = self._batches.order(self.passes - 1)
        indices = list(rows) if order is None else order[rows.start : rows.stop].tolist()
        return f"Its batch has the examples {show(indices) if len(indices) > 64 else indices}."


def _needs_equal_rows(strategy: Strategy) -> bool:
    """Whether all replicas run one program, so that the last batch is padded."""
    layout = strategy.layout
    return layout.num_logical > 1 or layout.num_virtual is not None


def _can_be_padded(source: Any) -> bool:
    """Whether no batch is larger than the first, to whose size all are padded."""
    if isinstance(source, Batches):
        return True
    if not isinstance(source, (list, tuple)):
        return False
    rows = [jnp.shape(leaf)[:1] for batch in source for leaf in jax.tree.leaves(batch)[:1]]
    return bool(rows) and rows[0] == max(rows)


def distribute_padded(strategy: Strategy, source: Any, batch_size: int) -> Iterable[Any]:
    """Return `(batch, mask)` for evaluation; all batches have one size, so one program runs.

    A distributed dataset has divided its batches already: their mask is None, and so is that of
    batches in a list whose first one is not the largest.
    """
    if isinstance(source, Examples):
        source = source.make_batches(batch_size)
    if isinstance(source, (list, tuple)) and not _can_be_padded(source):
        options = InputOptions(experimental_per_replica_buffer_size=_AHEAD, balance_rows=True)
        source = strategy.experimental_distribute_dataset(source, options)
    if isinstance(source, DistributedDataset):
        return ((batch, None) for batch in source)
    options = InputOptions(
        experimental_per_replica_buffer_size=_AHEAD,
        partial_batch=PartialBatch.PAD,
        balance_rows=True,
    )
    return strategy.experimental_distribute_dataset(source, options)
