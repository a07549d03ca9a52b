"""Several processes compute what one process with as many devices computes."""

import functools
import json
from typing import Any

import jax
import pytest

import jaxdist
from tests.processes.job import results_of_job
from tests.strategies.multi_worker.cases import CASES
from tests.strategies.multi_worker.compare import find_differences
from tests.strategies.multi_worker.running import run_cases, run_with
from tests.tables import sampled

# Processes and devices of each.
JOBS = [(2, 1), (2, 2), (3, 1), (4, 1)]
# What virtual replicas refuse in one process as well.
NOT_DETERMINISTIC = {
    "algorithms",
    "compressed_update",
    "extended",
    "fully_sharded",
    "gather_uneven",
    "lower",
    "run_inside_scan",
    "sharded_update",
    "uneven_values",
}
# A process of a job compiles all the cases that it runs, which takes most of the time.
_SAMPLED = sampled(list(CASES), 10)
_SAMPLED_DETERMINISTIC = sampled(sorted({*CASES} - NOT_DETERMINISTIC), 6)


def _names(rows: list[Any]) -> tuple[str, ...]:
    return tuple(row.id for row in rows)


@functools.cache
def _of_job(count: int, devices: int, how: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    env = {"CASES": json.dumps(names), "HOW": how}
    # Bits of different programs are compared, so machine code is optimized as users have it.
    results: list[dict[str, Any]] = results_of_job(
        run_cases, count, devices=devices, timeout=200, env=env, optimized=how != "{}"
    )
    return results


def _check(name: str, count: int, devices: int, how: str, names: tuple[str, ...]) -> None:
    options = json.loads(how)
    if options:
        # Bits are those of a process that has compiled everything with the same settings.
        (alone,) = _of_job(1, count * devices, how, names)
        expected = alone[name]
    else:
        strategy = jaxdist.MirroredStrategy(jax.devices()[: count * devices])
        (expected,) = run_with(strategy, [name]).values()
    assert not isinstance(expected, str), expected
    for index, results in enumerate(_of_job(count, devices, how, names)):
        result = results[name]
        assert not isinstance(result, str), f"process {index}: {result}"
        different = find_differences(result, expected, exact=bool(options))
        assert different == [], f"process {index}"


# One job runs all cases, so that its processes start once.
@pytest.mark.filterwarnings("ignore:strategy.run got")
@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_process_computes(name: str) -> None:
    _check(name, 2, 1, "{}", tuple(CASES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:strategy.run got")
@pytest.mark.parametrize("job", JOBS[1:], ids=lambda job: f"{job[0]}x{job[1]}")
@pytest.mark.parametrize("name", _SAMPLED)
def test_more_processes_compute_what_one_process_computes(name: str, job: tuple[int, int]) -> None:
    _check(name, *job, "{}", _names(_SAMPLED))


@pytest.mark.slow
@pytest.mark.parametrize("job", [(2, 1), (2, 2), (4, 1)], ids=lambda job: f"{job[0]}x{job[1]}")
@pytest.mark.parametrize("name", _SAMPLED_DETERMINISTIC)
def test_deterministic_steps_have_the_same_bits_in_any_number_of_processes(
    name: str, job: tuple[int, int]
) -> None:
    _check(name, *job, '{"deterministic": 8}', _names(_SAMPLED_DETERMINISTIC))
