"""Arguments of `schedule` that no worker can use: each one is an error that names it."""

import functools
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ArgumentTypeError, CallArgumentsError
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

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


def _take(x: Any, y: Any = 1, *, scale: Any) -> Any:
    return x * y * scale


def _take_two(a: Any, b: Any) -> Any:
    return a + b


def _take_all(a: Any, *more: Any, **named: Any) -> Any:
    return a


class _WithoutSignature:
    """A function of which Python does not know the signature, as of some builtins."""

    __signature__ = "none"

    def __call__(self, a: Any, b: Any) -> Any:
        return a * b


_MISFITS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "missing": (_take_two, (1.0,), {}, ("missing a required argument: 'b'", "args=(a, b).")),
    "none": (_take_two, (), {}, ("args with 0 values for _take_two", "_take_two(a, b)")),
    "surplus": (_take_two, (1.0, 2.0, 3.0), {}, ("args with 3 values", "too many positional")),
    "unknown": (
        _take_two,
        (1.0,),
        {"c": 2.0},
        ("args with 1 value and the keywords c", "_two(a, "),
    ),
    "twice": (_take_two, (1.0, 2.0), {"a": 2.0}, ("multiple values for argument 'a'",)),
    "by name": (
        _take,
        (1.0,),
        {},
        ("_take(x, y=..., scale)", "Pass args=(x,) and kwargs={'scale': scale}; y may follow."),
    ),
    "all": (_take_all, (), {}, ("_take_all(a, *more, **named)", "Pass args=(a,).")),
    "no arguments": (lambda: 1.0, (1.0,), {}, ("<lambda>()", "Pass neither args nor kwargs.")),
    "compiled": (jax.jit(_take_two), (1.0,), {}, ("_take_two(a, b)",)),
    "function": (jaxdist.function(_take_two), (1.0,), {}, ("_take_two(a, b)",)),
    "partial": (functools.partial(_take_two, 1.0), (1.0, 2.0), {}, ("partial(b)",)),
}


@pytest.mark.parametrize("case", _MISFITS)
def test_arguments_that_a_function_does_not_take_are_named_with_its_signature(case: str) -> None:
    fn, args, kwargs, words = _MISFITS[case]
    coordinator = ClusterCoordinator(make_strategy())
    with refused(CallArgumentsError, "ClusterCoordinator.schedule was given args", *words):
        coordinator.schedule(fn, args, kwargs)
    assert coordinator.statistics().scheduled == 0


def test_functions_are_called_with_the_arguments_that_fit() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    assert coordinator.schedule(_take, (2.0,), {"scale": 3.0}).fetch() == 6
    assert coordinator.schedule(_take_all, (2.0, 3.0), {"any": 1.0}).fetch() == 2
    assert coordinator.schedule(_WithoutSignature(), (2, 3)).fetch() == 6

    wrong: Any = _take_two

    def calls_wrongly(x: Any) -> Any:
        return wrong(x)

    with pytest.raises(TypeError, match=r"_take_two\(\) missing 1 required") as caught:
        coordinator.schedule(calls_wrongly, (1.0,))
    assert not isinstance(caught.value, CallArgumentsError)
