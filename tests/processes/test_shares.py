"""Each example once per epoch for 1 to 4 processes, in the order of one; also after a resume."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import _mesh as meshes
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement
from jaxdist.data import (
    AutoShardPolicy,
    PartialBatch,
    batches,
    distribute_dataset,
    from_files,
)
from tests.processes.threads import JOBS, ids_of, join, on_host, run_well
from tests.tables import examples

counts = st.sampled_from([1, 2, 3, 4])
keeping = st.sampled_from([PartialBatch.UNEVEN, PartialBatch.PAD])
AUTO, DATA, FILE, OFF = (AutoShardPolicy[n] for n in ("AUTO", "DATA", "FILE", "OFF"))
Steps = list[list[list[int]]]


def _grain(num: int, size: int) -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(np.arange(num)).shuffle(seed=3).batch(size)


def _files(num: int, size: int, *, shuffle: bool = False, of_file: int = 5) -> Any:
    starts = range(0, num, of_file)
    read = {str(s): list(range(s, min(s + of_file, num))) for s in starts}
    return from_files([*read], read.__getitem__, size, shuffle=shuffle)


# Each makes a new dataset of `num` examples in batches of `size`.
SOURCES: dict[str, Callable[[int, int], Any]] = {
    "batches": lambda num, size: batches(np.arange(num), size),
    "shuffled batches": lambda num, size: batches(np.arange(num), size, shuffle=True),
    "grain": _grain,
    "list": lambda num, size: list(batches(np.arange(num), size)),
    "generator function": lambda num, size: lambda: (b for b in batches(np.arange(num), size)),
    "files": _files,
}


def _read(
    owners: tuple[int, ...],
    make: Callable[[], Any],
    options: Any,
    *,
    state: Any = None,
    taken: int | None = None,
    passes: int = 1,
) -> tuple[list[Steps], list[Any]]:
    """For each process the ids of its replicas in each step, and the state after them."""

    def work(view: ReplicaMesh, agreement: Agreement) -> tuple[Steps, Any]:
        data = distribute_dataset(make(), view, options, agreement=agreement)
        steps: Steps = []
        last: Any = None
        for _ in range(passes):
            with iter(data) as iterator:
                if state is not None:
                    iterator.set_state(state)
                for step in itertools.islice(iterator, taken):
                    steps.append(ids_of(step, options.partial_batch))
                if _has_state(make):
                    last = iterator.get_state()
        return steps, last

    results = run_well(owners, work)
    return [steps for steps, _ in results], [last for _, last in results]


def _has_state(make: Callable[[], Any]) -> bool:
    return not callable(make()) or hasattr(make(), "__iter__")


def _flat(steps: Steps) -> list[int]:
    return [i for step in steps for of_replica in step for i in of_replica]


def _on_one(num_replicas: int, make: Callable[[], Any], options: Any, passes: int = 1) -> Steps:
    layout = meshes.build(jax.devices()[:num_replicas])
    data = distribute_dataset(make(), layout, options)
    return [ids_of(step, options.partial_batch) for _ in range(passes) for step in data]


@pytest.mark.parametrize("source", SOURCES)
@settings(deadline=None, max_examples=examples(25))
@given(
    count=counts, num=st.integers(1, 40), size=st.integers(1, 17), partial=keeping,
    depth=st.integers(0, 2), policy=st.sampled_from([None, DATA]), balanced=st.booleans(),
)  # fmt: skip
def test_each_example_is_once_in_an_epoch_in_the_order_and_at_the_replica_of_one_process(
    source: str,
    count: int,
    num: int,
    size: int,
    partial: PartialBatch,
    depth: int,
    policy: Any,
    balanced: bool,
) -> None:
    if source == "files":
        policy = DATA
    owners, make = JOBS[count], lambda: SOURCES[source](num, size)
    options = on_host(partial, policy, depth)._replace(balance_rows=balanced)
    steps = join(owners, _read(owners, make, options)[0])
    assert steps == _on_one(len(owners), make, options)
    assert sorted(_flat(steps)) == list(range(num))


@settings(deadline=None, max_examples=examples(40))
@given(
    count=counts, num=st.integers(1, 60), of_file=st.integers(1, 9), size=st.integers(1, 17),
    partial=keeping, policy=st.sampled_from([AUTO, FILE]), shuffle=st.booleans(),
    balanced=st.booleans(),
)  # fmt: skip
def test_each_example_of_files_is_once_in_each_epoch(
    count: int,
    num: int,
    of_file: int,
    size: int,
    partial: PartialBatch,
    policy: Any,
    shuffle: bool,
    balanced: bool,
) -> None:
    owners = JOBS[count]
    if policy is FILE:  # enough files, and rows in every process
        num, size = max(num, count * of_file), max(size, len(owners))
    make = lambda: _files(num, size, shuffle=shuffle, of_file=of_file)  # noqa: E731
    options = on_host(partial, policy)._replace(balance_rows=balanced)
    parts, _ = _read(owners, make, options)
    steps = join(owners, parts)
    assert sorted(_flat(steps)) == list(range(num))
    assert all(len(_flat([step])) <= size for step in steps)
    two, _ = _read(owners, make, options, passes=2)
    assert sorted(_flat(join(owners, two))) == sorted([*range(num)] * 2)
    assert join(owners, two)[: len(steps)] == steps


def test_with_files_each_process_opens_its_own_ones_only() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> list[str]:
        opened: list[str] = []

        def read(path: str) -> list[int]:
            opened.append(path)
            return [int(path)] * 3

        paths = [str(n) for n in range(7)]
        data = distribute_dataset(from_files(paths, read, 8), view, on_host(), agreement=agreement)
        assert len(list(data)) > 1
        return opened

    assert run_well(JOBS[2], work) == [["0", "2", "4", "6"], ["1", "3", "5"]]


@settings(deadline=None, max_examples=examples(40))
@given(
    count=counts, num=st.integers(1, 40), size=st.integers(1, 17), partial=keeping,
    source=st.sampled_from(sorted(SOURCES)), balanced=st.booleans(),
)  # fmt: skip
def test_without_sharding_each_process_has_every_example_once_in_their_order(
    count: int, num: int, size: int, partial: PartialBatch, source: str, balanced: bool
) -> None:
    make = lambda: SOURCES[source](num, size)  # noqa: E731
    options = on_host(partial, OFF)._replace(balance_rows=balanced)
    parts, _ = _read(JOBS[count], make, options)
    one = meshes.build(jax.devices()[:1])
    alone = [i for step in distribute_dataset(make(), one, on_host()) for i in step.tolist()]
    for steps in parts:
        assert _flat(steps) == alone


@settings(deadline=None, max_examples=examples(40))
@given(
    counts=st.tuples(counts, counts),
    num=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    partial=st.tuples(keeping, keeping),
    shuffle=st.booleans(),
    taken=st.integers(0, 10),
    policy=st.sampled_from([None, DATA]),
)
def test_a_state_of_some_processes_continues_in_the_order_of_one_on_any_number(
    counts: tuple[int, int],
    num: int,
    sizes: tuple[int, int],
    partial: tuple[PartialBatch, PartialBatch],
    shuffle: bool,
    taken: int,
    policy: Any,
) -> None:
    def make(size: int) -> Callable[[], Any]:
        return lambda: batches(np.arange(num), size, shuffle=shuffle)

    before, after = (JOBS[c] for c in counts)
    first, states = _read(before, make(sizes[0]), on_host(partial[0], policy), taken=taken)
    assert all(state == states[0] for state in states), "the same in every process"
    options = on_host(partial[1], policy)
    rest, _ = _read(after, make(sizes[1]), options, state=states[0])
    alone = [i for b in batches(np.arange(num), sizes[0], shuffle=shuffle) for i in b.tolist()]
    assert _flat(join(before, first)) + _flat(join(after, rest)) == alone


@pytest.mark.parametrize("source", ["grain", "list"])
@pytest.mark.parametrize("after", [1, 3])
def test_datasets_of_batches_saved_on_two_processes_continue_in_order(
    source: str, after: int
) -> None:
    make = lambda: SOURCES[source](23, 6)  # noqa: E731
    alone = [i for step in _on_one(2, make, on_host()) for of_replica in step for i in of_replica]
    first, states = _read(JOBS[2], make, on_host(), taken=2)
    assert states[0] == states[1]
    rest, _ = _read(JOBS[after], make, on_host(), state=states[0])
    found = _flat(join(JOBS[2], first)) + _flat(join(JOBS[after], rest))
    assert found == alone


@settings(deadline=None, max_examples=examples(40))
@given(
    counts=st.tuples(counts, counts), num=st.integers(4, 60), of_file=st.integers(1, 9),
    taken=st.integers(0, 6), size=st.integers(8, 17), policies=st.tuples(
        st.sampled_from([AUTO, DATA]), st.sampled_from([AUTO, DATA])), shuffle=st.booleans(),
)  # fmt: skip
def test_files_continue_with_the_examples_that_are_left_on_any_number_of_processes(
    counts: tuple[int, int],
    num: int,
    of_file: int,
    taken: int,
    size: int,
    policies: tuple[AutoShardPolicy, AutoShardPolicy],
    shuffle: bool,
) -> None:
    make = lambda: _files(num, size, of_file=of_file, shuffle=shuffle)  # noqa: E731
    before, after = (JOBS[c] for c in counts)
    first, states = _read(before, make, on_host(policy=policies[0]), taken=taken)
    assert all(state == states[0] for state in states), "the same in every process"
    rest, _ = _read(after, make, on_host(policy=policies[1]), state=states[0])
    found = _flat(join(before, first)) + _flat(join(after, rest))
    assert sorted(found) == list(range(num))


def test_without_sharding_a_state_continues_within_an_element() -> None:
    make = lambda: list(batches(np.arange(22), 9))  # noqa: E731
    whole, _ = _read(JOBS[3], make, on_host(policy=OFF))
    for taken in range(len(whole[0]) + 1):
        first, states = _read(JOBS[3], make, on_host(policy=OFF), taken=taken)
        assert all(state == states[0] for state in states)
        rest, _ = _read(JOBS[3], make, on_host(policy=OFF), state=states[0])
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole
