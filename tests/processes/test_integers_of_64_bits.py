"""Integers of 64 bits in jobs of real processes: those that do not fit are a named error."""

import pytest

from tests.processes.integers import WAYS, give_to_one_process, try_all_ways
from tests.processes.job import results_of_job


@pytest.mark.slow
def test_every_way_in_refuses_integers_that_do_not_fit_in_each_process() -> None:
    for found in results_of_job(try_all_ways, 2):
        assert list(found) == list(WAYS)
        for name, line in found.items():
            assert "int64 with integers from 1 to 1099511627781" in line, name


@pytest.mark.long
@pytest.mark.parametrize("name", ["dataset of a function", "values from a function"])
def test_a_value_of_one_process_is_an_error_there_and_nobody_waits_forever(name: str) -> None:
    first, second = results_of_job(give_to_one_process, 2, args=(name,))
    assert second == "ArgumentError"
    assert first == "UnavailableError"  # it waits for the other one
