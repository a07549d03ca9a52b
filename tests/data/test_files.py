"""`from_files`: examples of files in batches, positions within files, and what it refuses."""

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data import InputOptions, PartialBatch, batches, distribute_dataset, from_files
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from tests.layouts import make_layout
from tests.strategies.oracle import refused
from tests.tables import examples

HOST = InputOptions(False)


def _files(sizes: list[int], size: int, **how: Any) -> Any:
    ends = list(itertools.accumulate(sizes, initial=0))
    held = {str(n): list(range(*ends[n : n + 2])) for n in range(len(sizes))}
    return from_files([*held], held.__getitem__, size, **how)


def _ids(data: Any) -> list[int]:
    return [i for step in data for v in step.values for i in np.asarray(v).tolist()]


@settings(deadline=None, max_examples=examples(50))
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), size=st.integers(1, 9))
def test_batches_cross_files_and_hold_each_example_in_order(sizes: list[int], size: int) -> None:
    wanted = [] if not sum(sizes) else [b.tolist() for b in batches(np.arange(sum(sizes)), size)]
    assert [b.tolist() for b in _files(sizes, size)] == wanted


@settings(deadline=None, max_examples=examples(50))
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taken=st.integers(0, 8),
    shuffle=st.booleans(),
)
def test_a_pass_continues_at_the_next_example_also_with_another_batch_size(
    sizes: list[int], size: tuple[int, int], taken: int, shuffle: bool
) -> None:
    make = lambda n: distribute_dataset(_files(sizes, n, shuffle=shuffle), make_layout(2), HOST)  # noqa: E731
    with iter(make(size[0])) as iterator:
        first = _ids(itertools.islice(iterator, taken))
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(make(size[1])) as iterator:
        iterator.set_state(state)
        rest = _ids(iterator)
    assert first + rest == _ids(make(1))


def test_each_epoch_has_an_order_of_files_of_its_own_that_depends_on_the_seed() -> None:
    data = distribute_dataset(_files([2] * 9, 4, shuffle=True, seed=1), make_layout(2), HOST)
    first, second = _ids(data), _ids(data)
    assert sorted(first) == sorted(second) == list(range(18))
    assert first != second
    assert first == _ids(
        distribute_dataset(_files([2] * 9, 5, shuffle=True, seed=1), make_layout(2))
    )
    assert first != _ids(
        distribute_dataset(_files([2] * 9, 4, shuffle=True, seed=2), make_layout(2))
    )


def test_a_file_may_give_an_array_a_generator_or_nested_examples(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / f"{n}.npy" for n in range(2)]
    for n, path in enumerate(paths):
        np.save(path, np.full((3, 2), n))
    (batch,) = from_files(paths, np.load, 8)
    assert batch.tolist() == [[0, 0]] * 3 + [[1, 1]] * 3
    nested = from_files(["3", "4"], lambda p: ({"x": i, "y": np.ones(2)} for i in range(int(p))), 8)
    (step,) = nested
    assert (step["x"].tolist(), step["y"].shape) == ([0, 1, 2, 0, 1, 2, 3], (7, 2))


def test_padded_batches_have_the_batch_size_in_every_step() -> None:
    options = InputOptions(False, partial_batch=PartialBatch.PAD)
    steps = list(distribute_dataset(_files([3], 4), make_layout(2), options))
    assert [[v.tolist() for v in mask.values] for _, mask in steps] == [[[True] * 2, [True, False]]]


def test_a_file_that_cannot_be_read_is_named() -> None:
    with refused(ArgumentError, "no/such.npy", "FileNotFoundError", "exists"):
        list(from_files(["no/such.npy"], np.load, 2))

    def breaks(path: str) -> Any:
        yield 1
        raise RuntimeError(f"bad block in {path}")

    with refused(ArgumentError, "'a'", "bad block"):
        list(from_files(["a"], breaks, 2))


@pytest.mark.parametrize("found", [{"x": np.ones(2)}, None, 3, "text"])
def test_what_is_no_list_of_examples_is_refused(found: Any) -> None:
    with refused(ArgumentError, "read('a') returned", "examples of one file"):
        list(from_files(["a"], lambda _: found, 2))


def test_examples_of_different_shapes_or_structures_are_refused() -> None:
    for second in (np.ones(3), {"x": np.ones(2)}):
        with refused(ShapeError, "batch of 2 examples", "same shapes"):
            list(from_files(["a"], lambda _, second=second: [np.ones(2), second], 2))


@pytest.mark.parametrize(
    ("paths", "error", "part"),
    [
        ("data.npy", ArgumentTypeError, "paths='data.npy'"),
        (pathlib.Path("a"), ArgumentTypeError, "list of paths"),
        (3, ArgumentTypeError, "paths=3"),
        ([], ArgumentError, "0 paths"),
        (["a", 3], ArgumentTypeError, "3"),
        (["a", "b", "a"], ArgumentError, "'a' twice"),
    ],
)
def test_paths_are_a_list_of_different_paths(paths: Any, error: Any, part: str) -> None:
    with refused(error, part):
        from_files(paths, np.load, 2)


def test_other_arguments_are_checked() -> None:
    read: Any = 3
    with refused(ArgumentTypeError, "read=3"):
        from_files(["a"], read, 2)
    with refused(ArgumentError, "batch_size=0"):
        from_files(["a"], np.load, 0)
    with refused(ArgumentError, "seed=-1"):
        from_files(["a"], np.load, 2, seed=-1)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_files": 3}, "num_files=3"),
        ({"seed": 7}, "seed=7"),
        ({"read": [1]}, "a dict with"),
        ({"more": 1}, "a dict with"),
        ({"read": {"9": 1}}, "damaged"),
        ({"read": {"0": -2}}, "damaged"),
        ({"epoch": -1}, "damaged"),
    ],
)
def test_a_state_of_other_files_is_refused(change: dict[str, Any], part: str) -> None:
    iterator = iter(_files([2, 2], 2))
    state: Any = {**iterator.get_state(), **change}
    with refused(ArgumentError, part):
        iterator.set_state(state)
    assert [b.tolist() for b in iterator] == [[0, 1], [2, 3]]


def test_the_dataset_describes_itself() -> None:
    data = _files([2, 2], 2)
    assert repr(data) == "from_files(2 files, batch_size=2, shuffle=False, seed=0)"
    assert "from_files(2 files" in repr(distribute_dataset(data, make_layout(2)))
    assert data.cardinality == -2
