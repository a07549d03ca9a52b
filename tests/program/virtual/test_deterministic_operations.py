"""XLA computes the same operations for virtual replicas on 1, 2, 4 and 8 devices.

Stronger than a comparison of results, which may agree by chance: a rule of XLA that is used on some
numbers of devices only is seen for any data. Machine code need not be optimized for that.
"""

import collections
import re

import pytest

from tests.program.virtual.exact_rows import Group, groups
from tests.program.virtual.test_deterministic import virtual
from tests.tables import sampled

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = (\S+|\(.*?\)) ([a-z][a-z0-9-]*)\(", re.MULTILINE)
# Operations that move values, count iterations or select a row; they depend on the device count.
_MOVES = frozenset(
    """
    add all-gather bitcast broadcast call collective-permute compare concatenate constant convert
    copy dynamic-slice dynamic-update-slice fusion get-tuple-element iota opt-barrier pad parameter
    partition-id reshape select slice transpose tuple while
    """.split()
)


def _operations(group: Group, devices: int) -> collections.Counter[str]:
    """Count each operation that rounds in the compiled program, with its dtype."""
    program = virtual(devices).lower(group.step(), group.arguments()).compile()
    found = _INSTRUCTION.findall(program.as_text())
    assert found
    return collections.Counter(
        f"{op} {kind.split('[')[0]}" for kind, op in found if op not in _MOVES
    )


@pytest.mark.parametrize("group", sampled(groups(), 1))
def test_programs_compute_the_same_operations_on_every_number_of_devices(group: Group) -> None:
    one = _operations(group, 1)
    assert one
    for devices in 2, 4, 8:
        other = _operations(group, devices)
        differ = {op: (one[op], other[op]) for op in one | other if one[op] != other[op]}
        assert not differ, f"on 1 and on {devices} devices"
