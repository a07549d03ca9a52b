"""The English page of `tf.distribute.experimental.CollectiveHints`: its examples and statements."""

import inspect
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist.experimental import CollectiveHints
from tests.launching.launcher import wait_until
from tests.processes.job import results_of_job, start_job
from tests.seeds.hints import reduce_with_hints, train_with_hints
from tests.seeds.programs import count_packs, reduce_with_a_limit

pytestmark = pytest.mark.filterwarnings("ignore:.*CollectiveHints is the older name")


def test_the_example_of_bytes_per_pack_trains_as_one_device_does() -> None:
    weights, bias = train_with_hints(jaxdist.MirroredStrategy())
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    np.testing.assert_allclose(weights, 1 - 0.1 * rows.sum(0)[:, None] * np.ones(2), rtol=1e-6)
    np.testing.assert_allclose(bias, [-0.8, -0.8], rtol=1e-6)


def test_the_example_of_timeout_seconds_reduces_in_one_process() -> None:
    assert reduce_with_hints(120) == sum(range(8))


def test_the_arguments_have_the_names_and_defaults_of_the_page() -> None:
    found = inspect.signature(CollectiveHints).parameters
    assert list(found)[:2] == ["bytes_per_pack", "timeout_seconds"]
    hints: Any = CollectiveHints()
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (0, None)


@pytest.mark.parametrize(
    "wrong",
    [{"bytes_per_pack": -1}, {"bytes_per_pack": 1.5}, {"timeout_seconds": 0}],
    ids=str,
)
def test_invalid_values_raise_value_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CollectiveHints(**wrong)


@pytest.mark.parametrize(("bytes_per_pack", "packs"), [(1, [1] * 6), (40, [2] * 3)])
def test_an_all_reduce_of_several_workers_is_broken_into_packs(
    bytes_per_pack: int, packs: list[int]
) -> None:
    for operands, totals in results_of_job(count_packs, 2, args=(bytes_per_pack,)):
        assert operands == packs
        assert totals == [2 * n for n in range(1, 7)]


def test_zero_bytes_per_pack_choose_packs_automatically() -> None:
    for operands, totals in results_of_job(count_packs, 2, args=(0,)):
        # Of one process, all leaves fit into one.
        assert len(operands) == 1
        assert totals == [2 * n for n in range(1, 7)]


def test_a_collective_of_several_workers_that_takes_longer_raises_deadline_exceeded() -> None:
    with start_job(reduce_with_a_limit, 2, args=(3.0,)) as job:
        job.wait_for_line(1, "does not take part")
        wait_until(lambda: job.exit_code(0) is not None, 60)
        job.kill(1)
        outcome = job.wait(20)[0]
    assert outcome.result == "did something", outcome.describe()


@pytest.mark.parametrize(
    "strategy",
    [jaxdist.OneDeviceStrategy("cpu:0"), jaxdist.experimental.CentralStorageStrategy()],
    ids=lambda s: type(s).__name__,
)
def test_strategies_that_hints_do_not_apply_to_ignore_them(strategy: jaxdist.Strategy) -> None:
    hints = CollectiveHints(bytes_per_pack=1, timeout_seconds=1e-3)
    v = jaxdist.PerReplica([np.float32(2)] * strategy.num_replicas_in_sync)
    total = strategy.reduce("sum", v, axis=None, experimental_hints=hints)
    assert float(total) == 2 * strategy.num_replicas_in_sync
