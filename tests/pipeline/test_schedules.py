"""Tables of schedules: everything once, in order, with the bubble and the slots of the theory."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import errors
from jaxdist._pipeline.schedules import KINDS, SCHEDULES, Table, kinds_of
from jaxdist._pipeline.slots import find_slots
from jaxdist.nn.schedules import gpipe, one_f_one_b, zero_bubble
from tests.tables import examples

Make = Callable[[int, int, int], Table]
EACH = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
SIZES = st.integers(1, 8), st.integers(1, 40), st.integers(1, 4)


def find_faults(table: Table) -> Iterator[str]:
    """Sentences on what is wrong with a table; none if the engine can run it."""
    when: dict[tuple[str, int, int], int] = {}
    pieces = table.stages * table.chunks
    for n, tick in enumerate(table.ticks):
        if len(tick) != table.stages or not any(tick):
            yield f"tick {n} has {len(tick)} stages, or nothing to do"
        for stage, op in enumerate(tick):
            if op is not None:
                key = op.kind, op.chunk * table.stages + stage, op.micro_batch
                if key in when:
                    yield f"tick {n}: {op} of stage {stage} is repeated"
                when[key] = n
    kinds = "FIW" if table.has_two_parts else "FB"
    wanted = set(itertools.product(kinds, range(pieces), range(table.micro_batches)))
    if wanted != set(when):
        yield f"operations are missing or unknown: {wanted ^ set(when)}"
        return
    for piece, micro_batch in itertools.product(range(pieces), range(table.micro_batches)):
        orders: list[Any] = [((a, piece), (b, piece)) for a, b in itertools.pairwise(kinds)]
        if piece < pieces - 1:
            back = kinds[1]
            orders += [(("F", piece), ("F", piece + 1)), ((back, piece + 1), (back, piece))]
        for first, second in orders:
            if when[first[0], first[1], micro_batch] >= when[second[0], second[1], micro_batch]:
                yield f"micro-batch {micro_batch}: {second} is not after {first}"


@EACH
@given(*SIZES)
@settings(max_examples=examples(60, 1000), deadline=None)
def test_every_operation_is_there_once_and_after_what_it_needs(
    make: Make, stages: int, micro_batches: int, chunks: int
) -> None:
    assert list(find_faults(make(stages, micro_batches, chunks))) == []


@EACH
@given(*SIZES)
@settings(max_examples=examples(60, 1000), deadline=None)
def test_a_tick_has_one_kind_or_w_in_the_gaps(
    make: Make, stages: int, micro_batches: int, chunks: int
) -> None:
    table = make(stages, micro_batches, chunks)
    assert set(table.counts) <= {"F", "B", "I", "W", "FW", "IW"}
    assert sum(table.counts.values()) == len(table.ticks)
    groups = [tuple(map(kinds_of, group)) for group in table.groups]
    loops = len(list(itertools.groupby(groups)))
    # With fewer micro-batches than stages, each chunk leaves gaps of its own.
    most = 8 if micro_batches >= stages else 8 + 4 * chunks
    assert loops <= most, "each loop is compiled"


@EACH
@given(*SIZES)
@settings(max_examples=examples(60, 1000), deadline=None)
def test_the_bubble_is_that_of_the_theory_for_any_number_of_micro_batches(
    make: Make, stages: int, micro_batches: int, chunks: int
) -> None:
    table = make(stages, micro_batches, chunks)
    least = (stages - 1) / (micro_batches * chunks) / (3 if table.has_two_parts else 1)
    # W fills the gaps if there are enough of them; one chunk needs no full round of stages.
    enough = 2 * stages if table.has_two_parts else stages if chunks > 1 else 1
    if micro_batches >= enough:
        assert table.bubble() == pytest.approx(least)
    assert table.bubble() >= least - 1e-9


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 8), (4, 16), (4, 64), (8, 32)])
def test_slots_do_not_grow_with_micro_batches(stages: int, micro_batches: int) -> None:
    def count(make: Make, chunks: int = 1) -> dict[str, int]:
        return find_slots(make(stages, micro_batches, chunks)).sizes

    assert count(gpipe)["r"] == micro_batches
    assert count(one_f_one_b)["r"] == 2 * stages - 1
    assert count(zero_bubble)["r"] == max(3 * stages - 2, 1)
    assert count(zero_bubble)["d"] == max(2 * stages - 1, 1)
    assert count(one_f_one_b)["d"] == 0
    if (stages, micro_batches) == (4, 16):
        assert count(one_f_one_b, 2)["r"] == 11


@EACH
@given(*SIZES)
@settings(max_examples=examples(40, 1000), deadline=None)
def test_a_slot_holds_one_value_until_it_is_read(
    make: Make, stages: int, micro_batches: int, chunks: int
) -> None:
    """Runs the arrays that the engine reads, with names instead of numbers in the slots."""
    table = make(stages, micro_batches, chunks)
    slots = find_slots(table)
    rows = slots.arrays(table.ticks)
    last = stages * chunks - 1
    held: dict[tuple[str, int, int], object] = {}
    for n, tick in enumerate(table.ticks):
        sent: dict[tuple[str, int], object] = {}
        for stage, op in enumerate(tick):
            assert rows["kind"][n, stage] == (1 + KINDS.index(op.kind) if op else 0)
            if op is None:
                continue
            piece, m = op.chunk * stages + stage, op.micro_batch
            assert bool(rows["is_first"][n, stage]) == (piece == 0)
            assert bool(rows["is_last"][n, stage]) == (piece == last)

            def slot(name: str, n: int = n, stage: int = stage) -> tuple[str, int, int]:
                return name, stage, int(rows[name][n, stage])

            if op.kind == "F":
                if piece > 0:
                    assert held[slot("x")] == ("x", piece, m)
                held[slot("r")] = ("r", piece, m)
                if piece == last:
                    held[slot("g")] = ("g", piece, m)
                    assert rows["head_micro_batch"][n].tolist() == [m] * stages
                    assert rows["has_last"][n].all()
                else:
                    sent["x", (stage + 1) % stages] = ("x", piece + 1, m)
            else:
                assert held[slot("r")] == ("r", piece, m)
                if op.kind == "W":
                    assert held[slot("d")] == ("d", piece, m)
                    continue
                assert held[slot("g")] == ("g", piece, m)
                if op.kind == "I":
                    held[slot("d")] = ("d", piece, m)
                if piece > 0:
                    sent["g", (stage - 1) % stages] = ("g", piece - 1, m)
        for stage in range(stages):
            for name in "xg":
                to = int(rows[f"put_{name}"][n, stage])
                value = sent.get((name, stage))
                assert (value is None) == (to == slots.sizes[name])
                if value is not None:
                    held[name, stage, to] = value


@EACH
def test_without_gradients_a_table_has_its_forward_only(make: Make) -> None:
    table = make(4, 6, 2).forward_only
    assert table.counts == {"F": 2 * 6 + 3}
    assert not table.has_gradients
    assert find_slots(table).sizes == {"x": find_slots(table).sizes["x"], "g": 0, "r": 0, "d": 0}


def test_a_table_is_drawn_in_80_columns() -> None:
    drawn = str(zero_bubble(4, 8))
    assert drawn.splitlines()[:3] == [
        "zero_bubble: 4 stages, 8 micro-batches, 1 chunk",
        "27 ticks: 8 F, 3 FW, 8 I, 3 IW, 5 W; bubble 0.125",
        "",
    ]
    assert max(map(len, drawn.splitlines())) <= 80
    assert str(one_f_one_b(2, 2)).splitlines()[3:] == [
        "stage 0 F0 F1  .  . B0 B1",
        "stage 1  . F0 B0 F1 B1  .",
    ]
    assert "F10b" in str(gpipe(2, 12, 2))
    assert "F0.26" in str(gpipe(1, 1, 27))


def test_remat_makes_the_backward_of_the_input_longer() -> None:
    table = zero_bubble(4, 16)
    assert table.bubble() == pytest.approx(3 / 48)
    assert table.bubble({"F": 1, "I": 2, "W": 1}) == pytest.approx(0.09375)


@EACH
def test_numbers_that_make_no_table_are_refused(make: Make) -> None:
    with pytest.raises(errors.ArgumentError, match="stages=0"):
        make(0, 1, 1)
    with pytest.raises(errors.ArgumentError, match="micro_batches=0"):
        make(1, 0, 1)
    with pytest.raises(errors.ArgumentTypeError, match=r"chunks=1\.5"):
        make(1, 1, 1.5)  # pyrefly: ignore[bad-argument-type]
