"""Which policy counts: that of the options, that of a tf.data dataset, or the one that fits."""

import itertools
import logging
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement
from jaxdist.data import (
    AutoShardPolicy,
    InputOptions,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
    from_files,
)
from jaxdist.errors import ArgumentError
from tests.processes.threads import JOBS, ids_of, on_host, run_job, run_well
from tests.strategies.oracle import refused

OFF, DATA, FILE, HINT, AUTO = (AutoShardPolicy[n] for n in ("OFF", "DATA", "FILE", "HINT", "AUTO"))


class _TfDataset:
    """What jaxdist sees of a tf.data dataset."""

    def __init__(self, policy: int) -> None:
        self._policy = policy

    def as_numpy_iterator(self) -> Any:
        return iter([np.arange(4), np.arange(4, 8)])

    def cardinality(self) -> int:
        return 2

    def options(self) -> Any:
        own = types.SimpleNamespace(auto_shard_policy=self._policy)
        return types.SimpleNamespace(experimental_distribute=own)


def _read(
    make: Callable[[], Any], policy: AutoShardPolicy | None
) -> Callable[[ReplicaMesh, Agreement], Any]:
    def work(view: ReplicaMesh, agreement: Agreement) -> Any:
        data = distribute_dataset(make(), view, on_host(policy=policy), agreement=agreement)
        return [list(itertools.chain(*ids_of(step))) for step in data]

    return work


def test_policies_have_the_numbers_of_tensorflow() -> None:
    assert [(p.name, int(p)) for p in AutoShardPolicy] == [
        ("OFF", -1), ("AUTO", 0), ("FILE", 1), ("DATA", 2), ("HINT", 3)
    ]  # fmt: skip
    assert str(DATA) == "AutoShardPolicy.DATA"


@pytest.mark.parametrize(
    ("given", "own", "found"),
    [
        (None, OFF, OFF), (None, DATA, DATA), (None, AUTO, DATA),
        (AUTO, OFF, DATA), (DATA, OFF, DATA), (OFF, DATA, OFF), (OFF, HINT, OFF),
    ],
)  # fmt: skip
def test_the_policy_of_the_options_counts_before_that_of_the_dataset(
    given: Any, own: AutoShardPolicy, found: AutoShardPolicy
) -> None:
    parts = run_well((0, 1), _read(lambda: _TfDataset(own), given))
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts == ([whole, whole] if found is OFF else [whole[::2], whole[1::2]])


@pytest.mark.parametrize("owners", [JOBS[1], JOBS[2]])
def test_hint_is_refused_and_names_the_marks_of_tensorflow(owners: tuple[int, ...]) -> None:
    for error in run_job(owners, _read(lambda: batches(np.arange(8), 4), HINT)):
        assert isinstance(error, ArgumentError)
        assert "HINT and a Batches" in str(error)
        assert "shard(tf.data.experimental.SHARD_HINT" in str(error)
        assert "distribute_datasets_from_function" in str(error)


@pytest.mark.parametrize("policy", [HINT, FILE])
def test_policies_of_a_tf_dataset_that_need_tensorflow_are_refused_in_several_processes(
    policy: AutoShardPolicy,
) -> None:
    make = lambda: _TfDataset(policy)  # noqa: E731
    assert [type(e) for e in run_job(JOBS[2], _read(make, None))] == [ArgumentError] * 2
    assert run_well(JOBS[1], _read(make, None)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def _files(count: int, size: int) -> Any:
    return from_files([str(n) for n in range(count)], lambda p: [int(p)] * 2, size)


@pytest.mark.parametrize(
    ("files", "size", "part"),
    [(1, 8, "1 file(s) for 2 processes"), (4, 1, "a batch of 1 row(s)")],
)
def test_too_few_files_or_rows_are_data_with_auto_and_refused_with_file(
    files: int, size: int, part: str
) -> None:
    make = lambda: _files(files, size)  # noqa: E731
    for error in run_job((0, 1), _read(make, FILE)):
        assert isinstance(error, ArgumentError)
        assert part in str(error)
    assert run_well((0, 1), _read(make, AUTO)) == run_well((0, 1), _read(make, DATA))


def test_file_needs_a_dataset_of_files() -> None:
    (error, _) = run_job(JOBS[2], _read(lambda: batches(np.arange(8), 4), FILE))
    with refused(ArgumentError, "FILE and a Batches", "from_files", "DATA"):
        raise error  # type: ignore[misc]


@pytest.mark.parametrize("policy", [0, "AUTO", True])
def test_another_value_lists_the_policies(policy: Any) -> None:
    with refused(ArgumentError, "auto_shard_policy=", "AutoShardPolicy.FILE", "jaxdist.exp"):
        InputOptions(auto_shard_policy=policy)


def test_a_function_shards_its_dataset_itself() -> None:
    def work(view: ReplicaMesh, agreement: Agreement) -> Any:
        read = lambda _: [np.arange(2)] * 2  # noqa: E731
        assert distribute_datasets_from_function(read, view, on_host(policy=OFF)) is not None
        with refused(ArgumentError, "DATA", "input_pipeline_id", "experimental_distribute_dataset"):
            distribute_datasets_from_function(read, view, on_host(policy=DATA))

    run_well(JOBS[1], work)


def test_reading_everything_for_some_rows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxdist")
    run_well(JOBS[2], _read(lambda: batches(np.arange(8), 4), None))
    run_well(JOBS[2], _read(lambda: [np.arange(4)], None))
    assert caplog.text == ""
    run_well(JOBS[2], _read(lambda: iter([np.arange(4)]), None))
    assert caplog.text.count("every process reads whole batches of list_iterator") == 2


def test_of_a_grain_map_dataset_each_process_reads_its_own_examples_only() -> None:
    grain = pytest.importorskip("grain")

    class Counted:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: Any) -> int:
            self.asked.append(int(index))
            return int(index)

    def work(view: ReplicaMesh, agreement: Agreement) -> list[int]:
        source = Counted()
        dataset = grain.MapDataset.source(source).batch(4)
        data = distribute_dataset(dataset, view, on_host(), agreement=agreement)
        assert len(data) == len(list(data)) == 3
        return sorted(source.asked)

    # The last batch has 2 rows, for the replicas of process 0; process 1 reads one for its shape.
    assert run_well(JOBS[2], work) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 8]]


def test_a_grain_batch_of_the_users_own_function_is_read_whole() -> None:
    grain = pytest.importorskip("grain")
    longest = lambda rows: np.full(len(rows), max(rows))  # noqa: E731
    make = lambda: grain.MapDataset.source(range(8)).batch(4, batch_fn=longest)  # noqa: E731
    assert run_well((0, 1), _read(make, None)) == [[[3, 3], [7, 7]]] * 2
