"""Each example once per epoch: for any batch size, replicas and policy, and after resuming."""

import itertools
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import PerReplica
from jaxdist.data import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ShapeError
from tests.layouts import make_layout
from tests.tables import examples

replicas = st.sampled_from([1, 2, 3, 5, 8])
keeping = st.sampled_from([PartialBatch.UNEVEN, PartialBatch.PAD])


def _rows(leaf: Any) -> np.ndarray:
    values = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
    return np.concatenate([np.atleast_1d(np.asarray(v)) for v in values])


def _ids(element: Any, policy: PartialBatch) -> list[int]:
    """The real examples of one step, in the order of the replicas."""
    if policy is not PartialBatch.PAD:
        return _rows(element).tolist()
    batch, mask = element
    return _rows(batch)[_rows(mask)].tolist()


def _options(policy: PartialBatch, depth: int = 1, *, fetch: bool = False) -> InputOptions:
    # Values that stay on the host are the same ones, and nothing is compiled for their shapes.
    return InputOptions(fetch, experimental_per_replica_buffer_size=depth, partial_batch=policy)


@settings(deadline=None, max_examples=examples(60))
@given(
    num_examples=st.integers(1, 30),
    batch_size=st.integers(1, 33),
    num_replicas=replicas,
    policy=keeping,
    shuffle=st.booleans(),
    fetch=st.booleans(),
)
def test_uneven_and_padded_batches_give_each_example_once_in_an_order_of_the_seed_alone(
    num_examples: int,
    batch_size: int,
    num_replicas: int,
    policy: PartialBatch,
    shuffle: bool,
    fetch: bool,
) -> None:
    def source() -> Any:
        return batches(np.arange(num_examples), batch_size, shuffle=shuffle)

    options = _options(policy, fetch=fetch)
    data = distribute_dataset(source(), make_layout(num_replicas), options)
    alone = source()
    for _ in range(2):
        given_ids = [_ids(element, policy) for element in data]
        assert given_ids == [batch.tolist() for batch in alone]
        assert sorted(i for step in given_ids for i in step) == list(range(num_examples))


@settings(deadline=None, max_examples=examples(60))
@given(
    num_examples=st.integers(1, 30),
    batch_size=st.integers(1, 33),
    num_replicas=replicas,
    policy=st.sampled_from([PartialBatch.DROP, PartialBatch.ERROR]),
)
def test_dropping_leaves_out_just_the_batches_that_are_uneven_and_an_error_names_the_first(
    num_examples: int, batch_size: int, num_replicas: int, policy: PartialBatch
) -> None:
    source = [b.tolist() for b in batches(np.arange(num_examples), batch_size)]
    is_even = [len(b) % num_replicas == 0 for b in source]
    data = distribute_dataset(
        batches(np.arange(num_examples), batch_size), make_layout(num_replicas), _options(policy)
    )
    given_ids, error = [], None
    try:
        for element in data:
            given_ids.append(_ids(element, policy))
    except ShapeError as raised:
        error = str(raised)
    if policy is PartialBatch.DROP:
        assert given_ids == [b for b, even in zip(source, is_even, strict=True) if even]
        assert (error is not None) == (not any(is_even))
    elif all(is_even):
        assert (given_ids, error) == (source, None)
    else:
        first = is_even.index(False)
        assert given_ids == source[:first]
        assert f"element {first} " in str(error)


@settings(deadline=None, max_examples=examples(80))
@given(
    num_examples=st.integers(1, 30),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    on=st.tuples(replicas, replicas),
    policy=keeping,
    depth=st.integers(0, 2),
    taken=st.integers(0, 40),
)
def test_resuming_on_other_replicas_with_another_batch_size_goes_on_at_the_next_unseen_example(
    num_examples: int,
    sizes: tuple[int, int],
    on: tuple[int, int],
    policy: PartialBatch,
    depth: int,
    taken: int,
) -> None:
    def make(size: int, num_replicas: int) -> Any:
        source = batches(np.arange(num_examples), size, shuffle=True, repeat=2)
        return iter(distribute_dataset(source, make_layout(num_replicas), _options(policy, depth)))

    whole = batches(np.arange(num_examples), num_examples, shuffle=True, repeat=2)
    expected = [int(i) for batch in whole for i in batch]
    with make(sizes[0], on[0]) as first, make(sizes[1], on[1]) as resumed:
        before = [i for _, e in zip(range(taken), first, strict=False) for i in _ids(e, policy)]
        resumed.set_state(json.loads(json.dumps(first.get_state())))
        after = [i for e in resumed for i in _ids(e, policy)]
    assert before + after == expected


@settings(deadline=None, max_examples=examples(60))
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    on=st.tuples(replicas, replicas),
    policy=st.sampled_from([PartialBatch.UNEVEN, PartialBatch.PAD, PartialBatch.DROP]),
    taken=st.integers(0, 8),
    depth=st.integers(0, 2),
)
def test_lists_of_batches_of_any_sizes_resume_under_every_policy(
    counts: list[int], on: tuple[int, int], policy: PartialBatch, taken: int, depth: int
) -> None:
    if policy is PartialBatch.PAD:
        counts = sorted(counts, reverse=True)
    ends = np.cumsum([0, *counts])
    elements = [np.arange(a, b) for a, b in itertools.pairwise(ends)]

    def make(num_replicas: int) -> Any:
        layout = make_layout(num_replicas)
        return iter(distribute_dataset(elements, layout, _options(policy, depth)))

    def kept(given: list[np.ndarray], num_replicas: int) -> list[list[int]]:
        drops = policy is PartialBatch.DROP
        return [x.tolist() for x in given if not (drops and len(x) % num_replicas)]

    first_steps = kept(elements, on[0])[:taken]
    if policy is PartialBatch.DROP and not kept(elements, on[0]):
        return  # an error of its own
    with make(on[0]) as first, make(on[1]) as resumed:
        before = [_ids(next(first), policy) for _ in range(len(first_steps))]
        assert before == first_steps
        state = first.get_state()
        done = state["source"]["state"]
        if policy is PartialBatch.DROP and not state["steps"] and not kept(elements, on[1]):
            return
        resumed.set_state(state)
        after = [_ids(e, policy) for e in resumed]
    assert after == kept(elements[done:], on[1])
    # What was passed over before the state was either given or left out.
    assert before == kept(elements[:done], on[0])


@settings(deadline=None, max_examples=examples(40))
@given(
    num_examples=st.integers(1, 30),
    taken=st.integers(0, 12),
    num_replicas=replicas,
    depth=st.integers(0, 2),
)
def test_a_padded_pass_that_resumes_keeps_its_shape(
    num_examples: int, taken: int, num_replicas: int, depth: int
) -> None:
    # A source that does not tell its batch size, resumed where its next batch is a small one.
    elements = list(batches(np.arange(num_examples), 4, repeat=2))
    options = _options(PartialBatch.PAD, depth)

    def make() -> Any:
        return iter(distribute_dataset(elements, make_layout(num_replicas), options))

    with make() as first, make() as resumed:
        shapes = {len(_rows(b)) for _, (b, _) in zip(range(taken), first, strict=False)}
        resumed.set_state(first.get_state())
        shapes |= {len(_rows(b)) for b, _ in resumed}
    (rows,) = shapes
    assert rows == len(elements[0]) + -len(elements[0]) % num_replicas


@settings(deadline=None, max_examples=examples(60))
@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    on=st.tuples(replicas, replicas),
    policy=keeping,
    taken=st.integers(0, 20),
)
def test_datasets_of_a_function_give_each_example_once_and_resume_on_other_replicas(
    num_examples: int,
    batch_size: int,
    on: tuple[int, int],
    policy: PartialBatch,
    taken: int,
) -> None:
    def make(num_replicas: int) -> Any:
        source = batches(np.arange(num_examples), batch_size, shuffle=True)
        return iter(
            distribute_datasets_from_function(
                lambda _: source, make_layout(num_replicas), _options(policy)
            )
        )

    expected = next(iter(batches(np.arange(num_examples), num_examples, shuffle=True))).tolist()
    with make(on[0]) as first, make(on[1]) as resumed:
        before = [i for _, e in zip(range(taken), first, strict=False) for i in _ids(e, policy)]
        resumed.set_state(first.get_state())
        assert before + [i for e in resumed for i in _ids(e, policy)] == expected


@settings(deadline=None, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    policy=keeping,
    taken=st.integers(0, 10),
)
def test_one_dataset_for_each_replica_gives_each_of_its_examples_once_and_resumes(
    lengths: list[int], batch_size: int, policy: PartialBatch, taken: int
) -> None:
    def dataset_fn(context: InputContext) -> Any:
        mine = context.input_pipeline_id
        return batches(np.arange(lengths[mine]) + 100 * mine, batch_size)

    options = _options(policy)._replace(
        experimental_replication_mode=InputReplicationMode.PER_REPLICA
    )

    def make() -> Any:
        return iter(
            distribute_datasets_from_function(dataset_fn, make_layout(len(lengths)), options)
        )

    with make() as first, make() as resumed:
        before = [i for _, e in zip(range(taken), first, strict=False) for i in _ids(e, policy)]
        resumed.set_state(first.get_state())
        given_ids = before + [i for e in resumed for i in _ids(e, policy)]
    expected = [100 * r + i for r, length in enumerate(lengths) for i in range(length)]
    assert sorted(given_ids) == expected
