"""Integers of 64 bits in jobs of real processes: those that do not fit are a named error."""

import pytest

from tests.processes.integers import (
    FITS,
    WAYS,
    give_to_one_process,
    return_from_callbacks,
    try_all_ways,
)
from tests.processes.job import results_of_job


@pytest.mark.slow
def test_every_way_in_refuses_integers_that_do_not_fit_in_each_process() -> None:
    for found in results_of_job(try_all_ways, 2):
        assert list(found) == list(WAYS)
        for name, line in found.items():
            assert "int64 with integers from 1 to 1099511627781" in line, name


# In its own process: JAX keeps the error of a callback until the process ends.
@pytest.mark.slow
def test_what_a_callback_returns_is_checked_while_the_program_runs() -> None:
    (found,) = results_of_job(return_from_callbacks, 1, devices=2)
    assert len(found) == 6
    for name, (fits, error) in found.items():
        assert fits == FITS.tolist(), name
        assert "what its function returned, int64 with integers from 1 to 1099511" in error, name


@pytest.mark.long
@pytest.mark.parametrize("name", ["dataset of a function", "values from a function"])
def test_a_value_of_one_process_is_an_error_there_and_nobody_waits_forever(name: str) -> None:
    first, second = results_of_job(give_to_one_process, 2, args=(name,))
    assert second == "ArgumentError"
    assert first == "UnavailableError"  # it waits for the other one
