"""A pass announces exactly the uneven batches that it returns; the passes are the oracle."""

import random
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import PerReplica
from jaxdist._values import Ahead, steps_ahead
from jaxdist.data import (
    DistributedDataset,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from tests.layouts import make_layout
from tests.tables import examples

SEEDS = st.integers(0, 10**6)
EXAMPLES = settings(max_examples=examples(25, long=400), deadline=None)


def _rows(batch: Any) -> tuple[int, ...]:
    return tuple(v.shape[0] for v in batch.values)


def _pass(iterator: Any, most: int = 100) -> tuple[list[tuple[int, ...]], set[Ahead]]:
    """Return the rows of the replicas in each step, and the steps that the batches announce."""
    rows: list[tuple[int, ...]] = []
    told: set[Ahead] = set()
    for batch in iterator:
        rows.append(_rows(batch))
        told.add(steps_ahead(batch))
        if len(rows) == most:
            break
    return rows, told


def _check(rows: list[tuple[int, ...]], told: set[Ahead], before: int, *, ends: bool) -> Ahead:
    """Check each announced step against the pass, and return the announced steps."""
    (ahead,) = told
    for step in ahead:
        index = step.number - 1 - before
        assert rows[index] == step.rows
        assert step.is_last == (ends and index == len(rows) - 1)
    assert len({s.rows for s in ahead}) == len(ahead)
    uneven = [(i, r) for i, r in enumerate(rows) if len(set(r)) > 1]
    if ends and len(set(rows[-1])) > 1:
        assert rows[-1] in {s.rows for s in ahead}
    if uneven and not before:
        assert uneven[0][1] in {s.rows for s in ahead}
    return ahead


def _source(draw: random.Random, repeat: int | None) -> Any:
    return batches(
        np.arange(draw.randint(1, 30)),
        draw.randint(1, 12),
        repeat=repeat,
        shuffle=draw.random() < 0.5,
    )


@EXAMPLES
@given(SEEDS)
def test_the_shares_of_global_batches(seed: int) -> None:
    draw = random.Random(seed)
    repeat = draw.choice([1, 2, 3, None])
    data = distribute_dataset(_source(draw, repeat), make_layout(draw.choice([2, 3, 4])))
    iterator = iter(data)
    is_taken_up = draw.random() < 0.5
    if is_taken_up:
        # Where a position is taken up again, other steps are the short ones.
        state = iterator.get_state()
        state["source"]["index"] = draw.randint(0, state["source"]["num_examples"])
        state["steps"] = draw.randint(1, 9)
        iterator.set_state(state)
    before = iterator.get_state()["steps"]
    rows, told = _pass(iterator)
    if rows:
        ahead = _check(rows, told, before, ends=repeat is not None)
        uneven = {r for r in rows if len(set(r)) > 1}
        if repeat is not None and not is_taken_up:
            assert {s.rows for s in ahead} == uneven


@EXAMPLES
@given(SEEDS, st.booleans())
def test_a_batch_for_each_replica(seed: int, one_for_each: bool) -> None:
    draw = random.Random(seed)
    repeat = draw.choice([1, 2, 3, None])
    mode = InputReplicationMode.PER_REPLICA if one_for_each else InputReplicationMode.PER_WORKER
    data = distribute_datasets_from_function(
        lambda _: _source(draw, repeat),
        make_layout(draw.choice([2, 3, 4])),
        InputOptions(
            experimental_replication_mode=mode,
            experimental_fetch_to_device=not one_for_each,
        ),
    )
    iterator = iter(data)
    for _ in range(draw.choice([0, 0, 1, 2])):
        next(iterator, None)
    state = iterator.get_state()
    with iter(data) as again:
        again.set_state(state)
        rows, told = _pass(again)
    if rows:
        (ahead,) = told
        for step in ahead:
            index = step.number - 1 - state["steps"]
            assert rows[index] == step.rows
        if not one_for_each:
            _check(rows, told, state["steps"], ends=repeat is not None)
        elif repeat is not None and len(set(rows[-1])) > 1:
            assert rows[-1] in {s.rows for s in ahead}


@pytest.mark.parametrize("last", [np.arange(5), [1, 2, 3], np.float32(1)])
def test_the_last_element_of_a_list_tells_where_it_is_an_array(last: Any) -> None:
    data = [{"x": np.arange(8)}, {"x": last}]
    told = steps_ahead(next(iter(distribute_dataset(data, make_layout(4))))["x"])
    assert [(s.number, s.rows, s.is_last) for s in told] == (
        [(2, (2, 2, 1, 0), True)] if isinstance(last, np.ndarray) else []
    )


def _generated() -> Any:
    yield np.arange(8)
    yield np.arange(5)


@pytest.mark.parametrize(
    ("source", "num_replicas", "policy"),
    [
        (_generated, 4, PartialBatch.UNEVEN),
        (batches(np.arange(12), 8), 4, PartialBatch.UNEVEN),
        (batches(np.arange(13), 8, drop_remainder=True), 4, PartialBatch.UNEVEN),
        (batches(np.arange(13), 8), 1, PartialBatch.UNEVEN),
        (batches(np.arange(13), 8), 4, PartialBatch.DROP),
        (batches(np.arange(13), 8), 4, PartialBatch.ERROR),
        (batches(np.arange(13), 8), 4, PartialBatch.PAD),
    ],
)
def test_nothing_is_told_where_it_is_not_known_or_all_are_even(
    source: Any, num_replicas: int, policy: PartialBatch
) -> None:
    options = InputOptions(partial_batch=policy)
    data: DistributedDataset = distribute_dataset(source, make_layout(num_replicas), options)
    batch = next(iter(data))
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, PerReplica))
    assert all(not steps_ahead(leaf) for leaf in leaves)
