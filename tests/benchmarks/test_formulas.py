"""The formulas of the table: the messages that they write down really add everything up."""

import math

import numpy as np
import pytest

from benchmarks import _formulas
from benchmarks._formulas import ACROSS, BETWEEN, WITHIN, Step
from benchmarks._resnet import resnet50_shapes


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("name", ["psgpu", "pscpu", "nccl/rechd"])
def test_every_replica_hears_of_every_other_over_the_messages(name, count, first):
    heard = [{r} for r in range(count)]
    for step in _formulas.steps(name, count, 1, "cpu", first):
        sources = [a for a, _ in step.groups]
        targets = [b for _, b in step.groups]
        assert len(set(sources)) == len(sources)
        assert len(set(targets)) == len(targets)
        before = [set(h) for h in heard]
        for a, b in step.groups:
            heard[b] |= before[a]
    assert heard == [set(range(count))] * count


def test_a_ring_passes_every_part_to_every_replica_twice_around():
    steps = _formulas.steps("xring", 5, 1, "cpu")
    assert len(steps) == 8
    assert {tuple(s.groups) for s in steps} == {((0, 1), (1, 2), (2, 3), (3, 4), (4, 0))}


def test_two_levels_are_a_part_within_a_sum_across_and_everything_within():
    found = _formulas.expected("nccl/xring", 2, 8, 4, "cpu", 8)
    assert _formulas.in_words(found) == (
        "2 all-gather within, 4 collective-permute across, 2 reduce-scatter within"
    )
    # One worker, or workers of one replica, leave one of the two levels.
    assert _formulas.expected("nccl/xring", 1, 4, 4, "cpu", 4) == {("all-reduce", WITHIN): 1}
    assert _formulas.expected("nccl/xring", 1, 4, 1, "cpu", 4) == {
        ("collective-permute", ACROSS): 6
    }


@pytest.mark.parametrize(
    ("step", "found"),
    [
        # Two slices of 2.
        (
            Step("all-reduce", [[0, 1, 2, 3]]),
            {("all-reduce", WITHIN), ("all-reduce", BETWEEN), ("all-gather", WITHIN)},
        ),
        (Step("all-reduce", [[0, 2], [1, 3]]), {("all-reduce", BETWEEN)}),
        (Step("reduce-scatter", [[0, 1], [2, 3]]), {("all-reduce", WITHIN)}),
        (Step("all-gather", [[0, 1, 2, 3]]), {("all-gather", BETWEEN), ("all-gather", WITHIN)}),
        (Step("all-gather", [[1, 2, 3, 0]]), {("all-gather", BETWEEN)}),
        (
            Step("collective-permute", [(0, 1), (1, 2)]),
            {("collective-permute", WITHIN), ("collective-permute", BETWEEN)},
        ),
        (Step("collective-permute", [(0, 2)]), {("collective-permute", BETWEEN)}),
    ],
)
def test_what_crosses_slices_is_an_operation_of_its_own(step, found):
    assert set(_formulas.compiled(step, 2, "tpu", 2)) == found


def test_resnet_has_the_leaves_that_are_known_of_it():
    shapes = resnet50_shapes()
    sizes = np.array([math.prod(s) for s in shapes])
    assert len(shapes) == 161
    assert sizes.sum() == 25_557_032
    # So many are at most 64 KiB, and at most 1 MiB.
    assert ((4 * sizes <= 1 << 16).sum(), (4 * sizes <= 1 << 20).sum()) == (115, 143)
