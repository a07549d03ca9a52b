"""Every implementation of cross-device reductions adds up over processes as on one machine."""

import functools
from typing import Any

import pytest

from tests.processes.job import results_of_job
from tests.strategies.multi_worker.compare import find_differences
from tests.strategies.multi_worker.with_ops import make_ops, run_on_one_process, run_with_ops


@functools.cache
def _of_job() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = results_of_job(run_with_ops, 2, devices=2, timeout=100)
    return results


@functools.cache
def _of_one() -> dict[str, Any]:
    return run_on_one_process()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:strategy.run got")
@pytest.mark.parametrize("name", sorted(make_ops()))
def test_sums_and_the_groups_of_collectives_are_those_of_one_process(name: str) -> None:
    expected, groups = _of_one()[name]
    for result, found in (results[name] for results in _of_job()):
        assert find_differences(result, expected, exact=False) == []
        # The workers are the processes, so both levels have the same groups.
        assert found == groups
        assert found, "the program has collectives"
