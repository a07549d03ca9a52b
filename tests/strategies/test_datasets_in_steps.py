"""Datasets, and steps on what they give: every example counts once, whatever is left over."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import InputOptions, PartialBatch, get_replica_context
from jaxdist.data import batches
from tests.tables import examples


def _strategy(count: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def _sums(x: Any) -> Any:
    context = get_replica_context()
    return context.all_reduce("sum", (x.sum(), x.shape[0])), context.all_gather(x, axis=0)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(1, 3), st.integers(1, 13), st.integers(1, 6))
def test_a_step_on_every_batch_sees_every_example_once(
    replicas: int, examples: int, size: int
) -> None:
    strategy = _strategy(replicas)
    rows = np.arange(1, examples + 1, dtype=np.float32)
    seen = []
    for batch in strategy.experimental_distribute_dataset(batches(rows, size)):
        (total, count), whole = strategy.run(_sums, (batch,))
        assert float(total) == np.sum(whole)
        assert int(count) == len(whole)
        seen += np.asarray(whole).tolist()
    assert seen == rows.tolist()


def _masked(x: Any, mask: Any) -> Any:
    kept = jnp.where(mask, x, 0.0)
    return get_replica_context().all_reduce("sum", (kept.sum(), mask.sum()))


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_padded_batches_are_compiled_once_and_count_every_example_once(replicas: int) -> None:
    strategy = _strategy(replicas)
    rows = np.arange(1, 22, dtype=np.float32)
    options = InputOptions(partial_batch=PartialBatch.PAD)
    dataset = strategy.experimental_distribute_dataset(batches(rows, 8), options)
    sums = [strategy.run(_masked, batch) for batch in dataset]
    assert sum(float(total) for total, _ in sums) == rows.sum()
    assert [int(count) for _, count in sums] == [8, 8, 5]


def test_replicas_without_an_element_take_part_with_no_rows() -> None:
    strategy = _strategy(4)
    dataset = strategy.distribute_datasets_from_function(
        lambda _: [np.full(2, i, np.float32) for i in range(6)]
    )
    found = [strategy.run(_sums, (batch,)) for batch in dataset]
    assert [np.asarray(whole).tolist() for _, whole in found] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [4, 4, 5, 5],
    ]
    assert [int(count) for (_, count), _ in found] == [8, 4]
