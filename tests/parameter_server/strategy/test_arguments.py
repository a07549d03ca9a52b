"""Arguments of `schedule` that no worker can use: each one is an error that names it."""

import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ArgumentTypeError
from tests.parameter_server.strategy.making import make_strategy

# Stands for the file of a test.
_FILE = object()


def _generate() -> Iterator[np.ndarray]:
    yield np.ones(2, "float32")


@pytest.mark.parametrize(
    "make",
    [lambda: [np.ones(2, "float32")] * 3, lambda: np.ones((3, 2), "float32"), _generate, dict],
    ids=["list", "array", "generator", "no dataset"],
)
def test_a_dataset_in_the_place_of_its_iterator_is_named(make: Callable[[], Any]) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    dataset = coordinator.create_per_worker_dataset(make)
    said = r"given args\[1\]\['batches'\], a per-worker dataset, and not its iterator"
    with pytest.raises(ArgumentTypeError, match=said) as caught:
        coordinator.schedule(lambda x, d: next(d["batches"]), (1, {"batches": dataset}))
    assert "iter(dataset)" in str(caught.value)
    assert caught.value.__cause__ is None
    assert coordinator.statistics().scheduled == 0


def test_a_value_of_each_worker_is_an_argument_and_other_type_errors_stay() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    values = coordinator.create_per_worker_dataset(lambda: [np.float32(1), np.float32(2)])
    assert coordinator.schedule(lambda v: v[0] + v[1], (values,)).fetch() == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        coordinator.schedule(lambda v: v[0] + "a", (values,))


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        (_FILE, "an open file (TextIOWrapper)", "Read it here"),
        (iter([1]), "an iterator (list_iterator)", "next(kwargs['x'][0])"),
        (threading.Lock(), "an object of this process (lock)", "needs no lock"),
        (threading.Event(), "an object of this process (Event)", "Leave it out"),
        (queue.Queue(), "an object of this process (Queue)", "Leave it out"),
        (Future(), "an object of this process (Future)", "Leave it out"),
    ],
)
def test_an_object_that_only_this_process_has_is_named(
    given: Any, said: str, remedy: str, tmp_path: pathlib.Path
) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    with (tmp_path / "file").open("w") as file:
        given = file if given is _FILE else given
        with pytest.raises(ArgumentTypeError) as caught:
            coordinator.schedule(lambda x: 1, (), {"x": [given]})
    first, *rest = str(caught.value).splitlines()
    assert first == f"ClusterCoordinator.schedule was given kwargs['x'][0], {said}."
    assert remedy in rest[-1]
    assert not getattr(caught.value, "__notes__", ())
    assert coordinator.statistics().scheduled == 0


def test_an_object_that_cannot_be_a_constant_is_named() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    with pytest.raises(ArgumentTypeError, match=r"cannot take args\[0\]: it is a set"):
        coordinator.schedule(lambda x: 1, ({1, 2},))


def test_what_a_function_only_reads_is_a_constant() -> None:
    coordinator = ClusterCoordinator(make_strategy())

    def read(mode: str, given: Any, nothing: None) -> Any:
        return np.float32(len(mode) + given([1, 2]))

    assert coordinator.schedule(read, ("train", len, None)).fetch() == 7
