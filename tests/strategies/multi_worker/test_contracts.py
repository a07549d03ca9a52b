"""What holds for every strategy holds for one over several processes."""

import pytest

from tests.processes.job import run_job
from tests.strategies.multi_worker.contracts import run_contracts

ACROSS = [
    f"tests/strategies/across/test_{name}.py"
    for name in ("reduce", "gather", "merge_call", "local_results")
]
STRATEGIES = [
    f"tests/strategies/test_{name}.py"
    for name in ("run", "kinds", "contexts", "making", "interrupts")
]
EXTENDED = [f"tests/strategies/extended/test_{name}.py" for name in ("extended", "v1")]
VALUES = [
    *(f"tests/values/test_{name}.py" for name in ("variable", "placement", "per_replica")),
    "tests/program/variables/test_variables.py",
    "tests/program/functions/test_function.py",
]
COLLECTIVES = [
    f"tests/collectives/test_{name}.py"
    for name in ("all_reduce", "all_gather", "gradients", "indexed_slices")
]
DATA = ["tests/data/test_every_strategy.py"]
# For the short run: what all other tests are built on.
SAMPLE = [
    f"{STRATEGIES[0]}::test_every_replica_gets_its_own_part_of_a_per_replica_value",
    f"{ACROSS[0]}::test_the_result_is_tied_to_no_device",
    f"{ACROSS[2]}::test_values_and_local_results_in_a_merge_function_are_an_all_gather",
    f"{EXTENDED[0]}::test_reduce_to_a_distributed_value_is_mirrored_over_its_devices",
    f"{DATA[0]}::test_a_step_takes_its_batch_outside",
]


def test_a_sample_of_the_contracts_holds_over_two_processes() -> None:
    _check_contracts(SAMPLE, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [STRATEGIES + ACROSS, EXTENDED + VALUES + COLLECTIVES + DATA],
    ids=["strategies", "the rest"],
)
def test_all_contracts_hold_over_two_processes(tests: list[str]) -> None:
    _check_contracts(tests, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=str)
def test_all_contracts_hold_over_processes_of_other_shapes(shape: tuple[int, int]) -> None:
    everything = STRATEGIES + ACROSS + EXTENDED + VALUES + COLLECTIVES + DATA
    _check_contracts(everything, *shape)


@pytest.mark.parametrize(
    "tests",
    [SAMPLE, pytest.param(STRATEGIES + ACROSS + EXTENDED + VALUES + DATA, marks=pytest.mark.long)],
    ids=["sample", "all"],
)
def test_contracts_hold_where_the_processes_have_the_replicas_in_turn(tests: list[str]) -> None:
    _check_contracts(tests, 2, 2, in_turn=True)


def test_contracts_that_are_not_there_are_found() -> None:
    with pytest.raises(AssertionError, match="no contract test of tests/strategies/test_proper"):
        _check_contracts(["tests/strategies/test_properties.py"], 2, 1)


def test_contracts_that_fail_are_named_with_the_errors_of_all_processes() -> None:
    name = "test_a_strategy_says_how_many_replicas_it_has"
    with pytest.raises(AssertionError) as caught:
        _check_contracts([f"{STRATEGIES[3]}::{name}"], 2, 1, replicas=3)
    said = str(caught.value)
    assert said.startswith("2 failures\n")
    assert said.count(f"::{name}[processes]\n") == 2
    assert "in process 0: E " in said
    assert "in process 1: E " in said
    assert said.count("AssertionError: assert 2 == 3\n") == 2


def _check_contracts(
    tests: list[str],
    processes: int,
    devices: int,
    replicas: int | None = None,
    *,
    in_turn: bool = False,
) -> None:
    """Run tests in a job; the error lists each test that has failed, with its errors."""
    count = processes * devices if replicas is None else replicas
    outcomes = run_job(
        run_contracts,
        processes,
        args=(tests, in_turn),
        devices=devices,
        timeout=280,
        env={"JAXDIST_TESTS_OF_JOB": str(count), "JAXDIST_COLLECTIVE_SECONDS": "30"},
    )
    broken = [o.describe() for o in outcomes if o.exit_code or o.timed_out or o.result is None]
    assert not broken, "\n".join(broken)
    results: list[dict[str, str]] = [outcome.result for outcome in outcomes]
    for name in tests:
        for index, result in enumerate(results):
            found = [test for test in result if test.startswith(name)]
            assert found, f"no contract test of {name} ran in process {index}"
    assert all(result.keys() == results[0].keys() for result in results)
    failed = [
        f"{test}\n  in process {index}: {_shorten(result[test])}"
        for test in results[0]
        for index, result in enumerate(results)
        if result[test]
    ]
    assert not failed, f"{len(failed)} failures\n" + "\n".join(failed)


def _shorten(text: str) -> str:
    """The lines of the error in a report of pytest, if there are any."""
    lines = text.splitlines()
    return "\n    ".join([x for x in lines if x.startswith("E")][:12] or lines[-12:])
