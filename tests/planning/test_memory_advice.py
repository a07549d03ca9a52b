"""The search for a batch that fits, against memory that is a known function of the rows."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from jaxdist import cost, tpu
from jaxdist._planning import memory_advice
from jaxdist._planning.needs import Needs
from jaxdist._reports import Memory, Places, SlicePlan
from jaxdist.errors import ShapeError

LIMIT = 16 << 30
# Bytes of the compiled program that do not grow with the rows.
STATE, MOST_STATE = 1 << 20, LIMIT - (1 << 20)


def memory_of(rows: int, state: int, whole: float, curve: float) -> Memory:
    """`whole` bytes at a million rows, growing as their power `curve`."""
    peak = state + math.ceil(whole * (rows / 1e6) ** curve)
    return Memory(state, 0, 0, 0, 0, None, None, 0, peak, LIMIT, peak <= LIMIT)


def plan_of(rows: int, memory: Memory) -> SlicePlan:
    topology = tpu.slice_of("v5e:1x1").topology
    assignment = tpu.experimental.DeviceAssignment.build(topology, num_replicas=1)
    one = Places.from_assignment(assignment, 1)
    chip = cost.CHIPS["v5e"]
    return SlicePlan("step", "v5e:1x1", chip, 1, 1, one, "", rows, memory, None, None, (), None)


@given(
    st.integers(2, 10**6),
    st.integers(STATE, MOST_STATE),
    st.floats(1.0, 100.0),
    st.sampled_from([0.95, 1.0, 1.05]),
)
def test_the_batch_that_is_found_fits_is_nearly_the_largest_and_few_that_fit_are_tried(
    rows: int, state: int, over: float, curve: float
) -> None:
    whole = over * (LIMIT - state) / (rows / 1e6) ** curve
    tried: dict[int, Memory] = {}

    def needs_with(fewer: int) -> Needs:
        tried[fewer] = memory_of(fewer, state, whole, curve)
        return Needs(tried[fewer])

    made = plan_of(rows, memory_of(rows, state, whole, curve))
    if made.memory.fits:
        return
    said = list(memory_advice.make_advice(made, Needs(made.memory), needs_with, lambda what: None))
    largest = int(1e6 * ((LIMIT - state) / whole) ** (1 / curve))
    fitting = [fewer for fewer, memory in tried.items() if memory.fits]
    assert all(0 < fewer < rows for fewer in tried)
    assert len(tried) <= 6
    # The compiler writes code for those that fit, which takes minutes.
    assert len(fitting) <= 3
    if largest < 1:
        assert said[0].startswith("A smaller batch alone does not help: ")
        return
    found = max(fitting)
    assert said[0].startswith(f"A batch of {found:,} rows a replica")
    assert found <= largest + 1
    assert found >= 0.6 * largest - 1


def test_pieces_within_a_slice_that_do_not_fit_are_told_of_pieces_over_all_slices() -> None:
    topology = tpu.slice_of("v5e:2x2*2").topology
    eight = tpu.experimental.DeviceAssignment.build(topology, num_replicas=8)
    peak = LIMIT + (1 << 30)
    memory = Memory(2 << 30, 4 << 30, 0, 0, 0, None, None, 0, peak, LIMIT, False)
    made = dataclasses.replace(
        plan_of(1, memory),
        rules="fsdp_in_slice_tensor_parallel",
        num_slices=2,
        places=Places.from_assignment(eight, 2),
    )
    [said] = memory_advice.make_advice(made, Needs(memory), None, lambda what: None)
    assert said.startswith("fsdp_tensor_parallel keeps 1/8 ")
    assert "instead of 1/4" in said
    # Half of the 6 GiB of state.
    assert said.endswith("3 GiB less, 14 GiB, fits.")
    plain = dataclasses.replace(made, rules="fsdp")
    assert not memory_advice.make_advice(plain, Needs(memory), None, lambda what: None)


def test_a_search_ends_at_rows_that_a_step_cannot_have() -> None:
    def needs_with(fewer: int) -> Needs:
        if fewer % 8:
            raise ShapeError("3 rows on this replica, and micro_batches=8.")
        return Needs(memory_of(fewer, 1 << 30, 1e15, 1.0))

    for rows in 20, 4096:
        memory = memory_of(rows, 1 << 30, 1e18, 1.0)
        said = memory_advice.make_advice(plan_of(rows, memory), Needs(memory), needs_with, print)
        assert not any("A smaller batch alone" in line for line in said)
