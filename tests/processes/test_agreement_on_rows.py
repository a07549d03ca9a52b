"""What processes agree on before a batch: rows, ends, structures; and who does not take part."""

import collections
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist import _mesh as meshes
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement, LocalStore, Process
from jaxdist._values import agreed_shapes
from jaxdist.data import (
    AutoShardPolicy,
    InputContext,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
    from_files,
)
from jaxdist.errors import (
    ContextError,
    DeadlineExceededError,
    OtherProcessError,
    ProgramMismatchError,
    ShapeError,
    UnavailableError,
)
from tests.processes.threads import JOBS, ids_of, join, on_host, run_job, run_well
from tests.processes.views import view_from
from tests.strategies.oracle import refused

UNEVEN, PAD, DROP, ERROR = PartialBatch
Own = Callable[[int], Any]  # the dataset of a process


def _of_function(
    own: Own, partial: PartialBatch = UNEVEN, depth: int = 1, taken: int | None = None
) -> Callable[[ReplicaMesh, Agreement], Any]:
    """Work that reads a dataset of its own in each process."""

    def work(view: ReplicaMesh, agreement: Agreement) -> list[Any]:
        data = distribute_datasets_from_function(
            lambda context: own(context.input_pipeline_id),
            view,
            on_host(partial, depth=depth),
            agreement=agreement,
        )
        with iter(data) as iterator:
            return list(itertools.islice(iterator, taken))

    return work


def _of_dataset(
    own: Own, partial: PartialBatch = UNEVEN, policy: AutoShardPolicy | None = None
) -> Callable[[ReplicaMesh, Agreement], Any]:
    def work(view: ReplicaMesh, agreement: Agreement) -> list[Any]:
        source, options = own(view.process.index), on_host(partial, policy)
        return list(distribute_dataset(source, view, options, agreement=agreement))

    return work


def _errors(found: list[Any], kind: type[OtherProcessError]) -> list[Any]:
    assert [type(x) for x in found] == [kind] * len(found), found
    return found


def _check_names(error: OtherProcessError, processes: tuple[int, ...], count: int) -> None:
    """The error and its first line name these processes and no others."""
    assert error.processes == processes
    first = str(error).partition("\n")[0]
    assert [i for i in range(count) if f"process {i}" in first] == [*processes]


def test_each_process_is_asked_for_its_own_pipeline() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> list[Any]:
        asked: list[Any] = []

        def read(context: InputContext) -> Any:
            size = context.get_per_replica_batch_size(12)
            asked.append((str(context), context.num_replicas_in_sync, size))
            return [np.full(size, context.input_pipeline_id)] * len(view.local_replicas)

        options = on_host()
        (step,) = distribute_datasets_from_function(read, view, options, agreement=agreement)
        return [*asked, ids_of(step)]

    assert run_well(JOBS[3], work) == [
        [(f"jaxdist.InputContext(input pipeline id {p}, total: 3)", 6, 2), [[p, p]] * count]
        for p, count in enumerate([1, 2, 3])
    ]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_process_that_runs_out_takes_part_without_rows_until_all_have_ended(depth: int) -> None:
    lengths = [1, 5, 0]
    own: Own = lambda p: [np.full(2, 10 * p + i, np.int32) for i in range(lengths[p] * (p + 1))]  # noqa: E731
    steps = run_well((0, 1, 1, 2), _of_function(own, depth=depth))
    found = join((0, 1, 1, 2), [[ids_of(s) for s in of_process] for of_process in steps])
    assert found == [
        [[0, 0], [10, 10], [11, 11], []],
        *([[], [10 + i] * 2, [11 + i] * 2, []] for i in (2, 4, 6, 8)),
    ]
    shapes = [{agreed_shapes(of_process[i]) for of_process in steps} for i in range(5)]
    assert shapes == [{((2,), (2,), (2,), (0,))}] + [{((0,), (2,), (2,), (0,))}] * 4


@pytest.mark.parametrize("length", [0, 1])
def test_a_process_without_a_single_element_gets_the_structure_of_the_others(length: int) -> None:
    one = {"x": [np.ones((2, 3)), None], "y": (np.int8(4), np.zeros(2, bool))}
    own: Own = lambda p: [one] * (1 if p else length)  # noqa: E731
    first, second = run_well((0, 1), _of_function(own))
    assert (len(first), len(second)) == (1, 1)
    ((x, none), (y, z)) = first[0]["x"], first[0]["y"]
    assert none is None
    held = [(v.values[0].shape, str(v.values[0].dtype)) for v in (x, y, z)]
    assert held == [((2 * length, 3), "float32"), ((), "int8"), ((2 * length,), "bool")]
    assert int(y.values[0]) == 4 * length


def test_containers_that_are_not_pythons_cannot_be_built_without_an_element() -> None:
    pair = collections.namedtuple("pair", ["a"])
    found = run_job((0, 1), _of_function(lambda p: [pair(np.ones(2))] * p))
    _check_names(_errors(found[:1], ProgramMismatchError)[0], (0,), 2)
    assert "no element at all" in str(found[0])


def test_padding_is_that_of_the_largest_first_batch_of_all_processes() -> None:
    own: Own = lambda p: [np.arange(3 - p), np.arange(1 + p)]  # noqa: E731
    steps = run_well((0, 1), _of_function(own, PAD))
    assert [[m.values[0].sum() for _, m in s] for s in steps] == [[3, 1], [2, 2]]
    assert {b.values[0].shape for s in steps for b, _ in s} == {(3,)}
    found = run_job((0, 1), _of_function(lambda p: [np.arange(2), np.arange(2 + p)], PAD))
    assert all("cannot pad step 1 to 2 rows" in str(e) and "[2, 3]" in str(e) for e in found)


def test_dropping_and_errors_are_the_same_in_every_process() -> None:
    own: Own = lambda p: [np.arange(2), np.arange(2 + p), np.arange(3), *[np.arange(1)] * p]  # noqa: E731
    steps = run_well((0, 1), _of_function(own, DROP))
    assert [[ids_of(s) for s in of_process] for of_process in steps] == [
        [[[0, 1]], [[0, 1, 2]]]
    ] * 2
    found = run_job((0, 1), _of_function(own, ERROR))
    assert str(found[0]) == str(found[1])
    with refused(ShapeError, "step 1", "process 0: [2]", "process 1: [3]", "UNEVEN"):
        raise found[0]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("odd", "part"),
    [
        ({"x": np.ones((2, 4))}, "batch['x'] is float32[rows, 4]"),
        ({"x": np.ones((2, 3), np.int32)}, "batch['x'] is int32[rows, 3]"),
        ({"z": np.ones((2, 3))}, "else:  no batch['z']"),
        ({"x": [np.ones((2, 3))]}, "batch['x'][0]"),
        ({"x": np.float32(1)}, "a scalar of float32"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_batches_of_another_structure_name_the_process_and_the_leaf(
    odd: Any, part: str, culprit: int
) -> None:
    usual = {"x": np.ones((2, 3))}
    own: Own = lambda p: [odd if p == culprit else usual] * 2  # noqa: E731
    found = run_job((0, 1, 2), _of_function(own))
    for error in _errors(found, ProgramMismatchError):
        _check_names(error, (culprit,), 3)
        assert "float32[rows, 3]" in str(error)
        assert part in str(error)


def test_arrays_in_memory_of_another_structure_or_length_are_refused_at_the_first_batch() -> None:
    found = run_job(JOBS[2], _of_dataset(lambda p: batches(np.ones((8, 2 + p)), 4)))
    for error in _errors(found, ProgramMismatchError):
        _check_names(error, (1,), 2)
    found = run_job(JOBS[3], _of_dataset(lambda p: batches(np.ones(9 if p == 1 else 8), 4)))
    for error in _errors(found, ProgramMismatchError):
        _check_names(error, (1,), 3)
        assert "8 examples" in str(error)


def test_batches_of_another_size_are_refused_where_rows_are_cut_for_padding() -> None:
    found = run_job(JOBS[2], _of_dataset(lambda p: [np.arange(4 + 4 * p)], PAD))
    assert isinstance(found[0], ProgramMismatchError)
    _check_names(found[0], (1,), 2)
    assert "pads each replica to 2 rows" in str(found[0])


def test_scalars_have_no_rows_to_split_in_several_processes() -> None:
    for error in run_job(JOBS[2], _of_dataset(lambda _: [np.float32(1)])):
        assert isinstance(error, ShapeError)
        assert "batch is a scalar" in str(error)


def test_another_position_or_policy_is_refused() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> Any:
        data = distribute_dataset(batches(np.ones(8), 2), view, on_host(), agreement=agreement)
        with iter(data) as iterator:
            state = iterator.get_state()
            if view.process.index:
                state["source"]["index"] = 2
            iterator.set_state(state)
            return next(iterator)

    for error in _errors(run_job(JOBS[2], work), ProgramMismatchError):
        _check_names(error, (1,), 2)
        assert "position" in str(error)
    policies: list[PartialBatch] = [UNEVEN, PAD]
    mixed = lambda view, agreement: _of_dataset(  # noqa: E731
        lambda _: batches(np.ones(8), 2), policies[view.process.index]
    )(view, agreement)
    for error in _errors(run_job(JOBS[2], mixed), ProgramMismatchError):
        assert "partial_batch" in str(error)


def test_processes_that_leave_a_loop_after_the_same_step_wait_for_nobody() -> None:
    begin = time.monotonic()
    for depth in (0, 1, 4):
        steps = run_well((0, 1), _of_function(lambda p: [np.arange(2)] * 9, depth=depth, taken=3))
        assert [len(s) for s in steps] == [3, 3]
    assert time.monotonic() - begin < 4, "closing would wait 5 s for a thread that waits"


def test_a_thread_that_waits_for_another_process_ends_when_its_iterator_is_closed() -> None:
    view, store = view_from(_layout(), 0, (0, 1), 2), LocalStore()
    ahead = Agreement(store, Process(1, 2))
    offer = {"rows": [2], "padded": 0, "progress": {}, "same": {"partial_batch": "UNEVEN"}}
    waiting = threading.Thread(target=ahead.gather, args=("data/0", json.dumps(offer)))
    waiting.start()
    data = distribute_datasets_from_function(
        lambda _: [np.arange(2)] * 9, view, on_host(), agreement=Agreement(store, Process(0, 2))
    )
    begin = time.monotonic()
    with iter(data) as iterator:
        next(iterator)  # process 1 never comes for the second step, which is read ahead
    waiting.join()
    assert time.monotonic() - begin < 4


def test_a_process_that_leaves_a_loop_early_is_named() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> Any:
        taken = 2 if view.process.index == 1 else None
        return _of_function(lambda p: [np.arange(2)] * 9, taken=taken)(view, agreement)

    found = run_job((0, 1, 2), work)
    for error in _errors([found[0], found[2]], UnavailableError):
        _check_names(error, (1,), 3)
        assert "left the loop" in str(error)


def test_an_error_of_the_data_of_one_process_is_told_to_the_others() -> None:
    def failing(p: int) -> Any:
        yield np.arange(2)
        if p == 1:
            raise OSError("disk is gone")
        yield np.arange(2)

    found = run_job((0, 1, 2), _of_function(failing))
    assert isinstance(found[1], OSError)
    for error in _errors([found[0], found[2]], UnavailableError):
        _check_names(error, (1,), 3)
        assert "disk is gone" in str(error)


def test_a_process_that_does_not_come_is_waited_for_as_long_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXDIST_COLLECTIVE_SECONDS", "1")
    work = _of_function(lambda p: [np.arange(2)] * 9)
    store, view = LocalStore(), view_from(_layout(), 0, (0, 1), 2)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="rows of step 1") as caught:
        work(view, Agreement(store, Process(0, 2)))
    assert 0.9 < time.monotonic() - begin < 10
    _check_names(caught.value, (1,), 2)


def test_processes_that_are_not_connected_cannot_read_data_of_their_own() -> None:
    view = view_from(_layout(), 0, (0, 1), 2)
    data = distribute_datasets_from_function(lambda _: [np.arange(2)], view, on_host())
    with refused(ContextError, "not connected", "MultiWorkerMirroredStrategy"):
        next(iter(data))
    # Where the rows follow from the data, nobody has to be asked.
    (step,) = distribute_dataset(batches(np.arange(3), 4), view, on_host())
    assert ids_of(step) == [[0, 1]]
    (step,) = distribute_dataset([np.arange(3)], view, on_host())
    assert ids_of(step) == [[0, 1]]


def test_the_element_of_a_process_with_several_replicas_have_one_shape_behind_the_rows() -> None:
    found = run_job(JOBS[2], _of_function(lambda p: [np.ones((2, 3)), np.ones((2, 3 + p))]))
    assert isinstance(found[1], ShapeError)
    assert "more than their rows" in str(found[1])
    _check_names(_errors(found[:1], UnavailableError)[0], (1,), 2)


def test_rows_of_arrays_in_memory_are_agreed_once_and_rows_of_generators_in_each_step() -> None:
    def work(source: Callable[[], Any]) -> Callable[[ReplicaMesh, Agreement], int]:
        def count(view: ReplicaMesh, agreement: Agreement) -> int:
            asked: list[str] = []
            gather = agreement.gather

            def counted(channel: str, *args: Any, **how: Any) -> Any:
                asked.append(channel)
                return gather(channel, *args, **how)

            agreement.gather = counted  # type: ignore[method-assign]
            assert (
                len(list(distribute_dataset(source(), view, on_host(), agreement=agreement))) == 5
            )
            return len(asked)

        return count

    assert run_well(JOBS[2], work(lambda: batches(np.arange(20), 4))) == [1, 1]
    assert run_well(JOBS[2], work(lambda: iter(list(batches(np.arange(20), 4))))) == [6, 6]


def test_no_thread_is_left_after_passes_of_all_kinds() -> None:
    # Other tests of this process may have threads.
    before = set(threading.enumerate())
    run_well(JOBS[2], _of_dataset(lambda _: batches(np.arange(20), 4)))
    run_well(JOBS[2], _of_function(lambda p: [np.arange(2)] * 9, taken=3))
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if t.name == "jaxdist-prefetch" and t.is_alive()] == []


def test_a_state_of_two_processes_with_data_of_their_own_continues_in_each() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> Any:
        own = lambda c: [np.full(1, 10 * c.input_pipeline_id + i) for i in range(4)]  # noqa: E731
        data = distribute_datasets_from_function(own, view, on_host(PAD), agreement=agreement)
        with iter(data) as iterator:
            next(iterator)
            state = iterator.get_state()
            rest = [ids_of(s, PAD) for s in iterator]
        with iter(data) as iterator:
            iterator.set_state(state)
            assert [ids_of(s, PAD) for s in iterator] == rest
        return rest

    assert run_well((0, 1), work) == [[[[p + 1]], [[p + 2]], [[p + 3]]] for p in (0, 10)]


def test_a_process_without_files_takes_part_without_rows() -> None:
    files = lambda _: from_files(["a", "b"], {"a": [0, 1, 2], "b": [3]}.__getitem__, 4)  # noqa: E731
    steps = run_well((0, 1), _of_dataset(files, policy=AutoShardPolicy.FILE))
    assert [[ids_of(s) for s in of] for of in steps] == [[[[0, 1]], [[2]]], [[[3]], [[]]]]


def _layout() -> ReplicaMesh:
    return meshes.build(jax.devices()[:2])
