"""Which process is behind, for generated tables and for the cases of Note [Behind]."""

import re

import hypothesis
import pytest

from jaxdist._processes.watching.diagnosis import (
    Diagnosis,
    diagnose,
    diagnose_lost,
    name_processes,
)
from jaxdist._processes.watching.observer import SILENT_SECONDS, ProcessState, Seen
from tests.processes.watching.table import tables

WAITS = Seen(ProcessState(0, place="reduce (call 2)", step=7, in_wait=True))
OUTSIDE = Seen(ProcessState(0, place="outside of jaxdist", line="train.py:31 (main)", step=7))
LEFT_FOR_1 = Seen(ProcessState(0, blames=(1,)))


def _assert_names_the_culprits(found: Diagnosis, own: int) -> None:
    first = found.text.splitlines()[0]
    named = {int(number) for number in re.findall(r"(?i)process (\d+)", first)}
    assert named == {*found.behind}
    assert own not in found.behind
    assert found.have_ended <= bool(found.behind)


@hypothesis.given(tables())
def test_the_first_line_names_who_is_behind_and_no_other(table: dict[int, Seen]) -> None:
    _assert_names_the_culprits(diagnose(table, 0), 0)
    _assert_names_the_culprits(diagnose_lost(table, 0), 0)


@hypothesis.given(tables())
def test_who_waits_and_sends_news_is_named_only_by_step_or_by_another(
    table: dict[int, Seen],
) -> None:
    found = diagnose(table, 0)
    blamed = {i for seen in table.values() if seen.state for i in seen.state.blames or ()}
    for index in found.behind:
        seen = table[index]
        waits = seen.state is not None and seen.state.in_wait
        if waits and seen.ended is None and not seen.is_silent and index not in blamed:
            steps = {s.state.step for s in table.values() if s.state and s.state.in_wait}
            places = {s.state.place for s in table.values() if s.state and s.state.in_wait}
            assert len(steps) > 1 or len(places) > 1


@hypothesis.given(tables())
def test_who_has_ended_by_itself_comes_before_all_others(table: dict[int, Seen]) -> None:
    roots = {
        i
        for i, seen in table.items()
        if i and seen.ended is not None and (seen.state is None or seen.state.blames is None)
    }
    if roots:
        assert {*diagnose(table, 0).behind} == roots
        assert diagnose(table, 0).have_ended


@pytest.mark.parametrize(
    ("others", "behind"),
    [
        ([OUTSIDE, WAITS], (1,)),
        ([WAITS, OUTSIDE], (2,)),
        ([OUTSIDE, OUTSIDE], (1, 2)),
        ([WAITS, WAITS], ()),
        # The one that is silent inside of the collective is not behind if another is outside.
        ([OUTSIDE, Seen(WAITS.state, SILENT_SECONDS + 1)], (1,)),
        ([WAITS, Seen(WAITS.state, SILENT_SECONDS + 1)], (2,)),
        ([Seen(WAITS.state, is_stopped=True), WAITS], (1,)),
        # It is certain that a stopped process does not come.
        ([OUTSIDE, Seen(WAITS.state, is_stopped=True)], (2,)),
        ([Seen(None, SILENT_SECONDS + 1), WAITS], (1,)),
        # A process that has left the collective because of another one is innocent.
        ([Seen(WAITS.state, SILENT_SECONDS + 1), LEFT_FOR_1], (1,)),
        ([WAITS, LEFT_FOR_1], (1,)),
        ([OUTSIDE, Seen(OUTSIDE.state, ended="signal SIGKILL")], (2,)),
        # It ended because of process 1.
        ([OUTSIDE, Seen(LEFT_FOR_1.state, ended="UnavailableError")], (1,)),
        # In the collective of an earlier step, or an earlier call.
        ([Seen(ProcessState(1, step=6, in_wait=True, place="reduce (call 1)")), WAITS], (1,)),
        ([WAITS, Seen(ProcessState(2, step=7, in_wait=True, place="reduce (call 1)"))], (2,)),
        # Different collectives cannot be compared.
        ([WAITS, Seen(ProcessState(2, step=7, in_wait=True, place="gather (call 1)"))], ()),
    ],
)
def test_who_is_behind(others: list[Seen], behind: tuple[int, ...]) -> None:
    found = diagnose({0: WAITS, 1: others[0], 2: others[1]}, 0)
    assert found.behind == behind
    _assert_names_the_culprits(found, 0)


def test_after_a_lost_connection_who_lives_and_is_outside_is_not_named() -> None:
    gone = Seen(WAITS.state, SILENT_SECONDS + 1)
    assert diagnose_lost({0: WAITS, 1: OUTSIDE, 2: WAITS}, 0).behind == ()
    found = diagnose_lost({0: WAITS, 1: OUTSIDE, 2: gone}, 0)
    assert (found.behind, found.have_ended) == ((2,), True)
    stopped = Seen(WAITS.state, SILENT_SECONDS + 1, is_stopped=True)
    found = diagnose_lost({0: WAITS, 1: OUTSIDE, 2: stopped}, 0)
    assert (found.behind, found.have_ended) == ((2,), False)


def test_a_process_that_the_others_gave_up_is_told_so() -> None:
    given_up = Seen(ProcessState(1, blames=(0,)))
    found = diagnose_lost({0: WAITS, 1: given_up}, 0)
    assert found.behind == ()
    assert found.text.startswith("The other processes have stopped waiting for this one.")


def test_a_report_has_line_step_stack_and_what_the_others_wait_in() -> None:
    state = ProcessState(
        1, line="train.py:31 (main)", step=7, seconds=58.0, host="h", place="outside of jaxdist",
        stack='File "train.py", line 31, in main\n', raised="KeyError: 3",
    )  # fmt: skip
    text = diagnose({0: WAITS, 1: Seen(state, 2.0)}, 0).text
    assert text.splitlines()[0] == (
        "process 1 is behind on h: it is at train.py:31 (main), not inside the collective, step 7, "
        "for 60 s."
    )
    assert '    File "train.py", line 31, in main' in text
    assert "a thread has raised KeyError: 3" in text
    assert "process 0, which reports this" in text
    assert "in reduce (call 2)" in text


def test_processes_are_named_as_people_do() -> None:
    assert name_processes([1]) == "process 1"
    assert name_processes([1, 2, 4]) == "process 1, process 2 and process 4"
