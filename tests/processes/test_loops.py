"""Loops over datasets in real processes end well: after the last data of all, and after `break`."""

from tests.processes.job import results_of_job
from tests.processes.loops import leave_loops_open, read_until_all_have_ended


def test_a_loop_goes_on_until_the_data_of_all_real_processes_has_ended() -> None:
    # One replica in each process: process 0 has 2 elements of 3 rows, process 1 has 6.
    (sums, own), (other_sums, other) = results_of_job(read_until_all_have_ended, 2)
    assert sums == other_sums == [6.0, 12.0, 9.0, 12.0, 15.0, 18.0]
    assert (own, other) == ([3, 3, 0, 0, 0, 0], [3] * 6)


def test_processes_that_leave_loops_open_end_with_code_0() -> None:
    assert results_of_job(leave_loops_open, 2, devices=2) == [4, 4]
