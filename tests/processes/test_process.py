"""A process of a job as a value."""

from typing import Any

import pytest

from jaxdist._processes import Process, get_current_process
from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.strategies.oracle import refused


def test_a_process_alone_is_the_first_of_one() -> None:
    assert get_current_process() == Process(0, 1)
    assert get_current_process().is_first


def test_only_the_first_process_is_first() -> None:
    assert [Process(index, 4).is_first for index in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("index", [4, 5, -1])
def test_a_number_that_no_process_of_the_job_has_is_refused(index: int) -> None:
    with refused(ArgumentError, "count=4", f"index={index}", "from 0 to 3", "index=0"):
        Process(index, 4)


def test_a_job_has_a_process() -> None:
    with refused(ArgumentError, "count=0", "from 1 up", "count=1"):
        Process(0, 0)


@pytest.mark.parametrize(
    ("index", "count", "part"),
    [("0", 4, "index='0'"), (0, 4.0, "count=4.0"), (True, 2, "index=True"), (0, None, "None")],
)
def test_what_is_no_number_is_refused(index: Any, count: Any, part: str) -> None:
    with refused(ArgumentTypeError, part, "integer"):
        Process(index, count)
