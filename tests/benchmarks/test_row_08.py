"""When the compiled step has no more collectives than the hand-written one."""

import pytest

from benchmarks.row_08_collectives_count import is_no_more


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("all-reduce[7]", "all-reduce[7]", True),
        ("all-reduce[1]", "all-reduce[144] all-reduce[256]", True),
        ("all-reduce[8]", "all-reduce[7]", False),
        ("all-reduce[1] all-reduce[1]", "all-reduce[7]", False),
        ("all-gather[1] all-reduce[1]", "all-reduce[7]", False),
        ("none", "all-reduce[1]", False),
    ],
)
def test_kinds_operations_and_operands_are_compared(ours: str, theirs: str, expected: bool) -> None:
    assert is_no_more(ours, theirs) is expected
