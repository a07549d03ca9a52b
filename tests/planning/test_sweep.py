"""A comparison of layouts: the fastest by the expected time first, then those that do not fit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist._reports import Candidate, Expected, SlicePlan, Sweep, seconds

pytest.importorskip("libtpu")


@pytest.fixture(scope="module")
def plan() -> SlicePlan:
    program = jaxdist.OneDeviceStrategy("cpu:0").lower(lambda x: x @ x.T, (np.ones((8, 8)),))
    return program.compile_for("v5e:1x1", quick=True)


def _candidate(plan: SlicePlan, row: tuple[float, float, bool], number: int) -> Candidate:
    predicted, expected, fits = row
    assert plan.times is not None
    times: Any = dataclasses.replace(plan.times, compute=0.0, hbm=predicted, collectives=0.0)
    made = dataclasses.replace(
        plan,
        times=times,
        expected=Expected(expected, 0.0, 0.0),
        memory=dataclasses.replace(plan.memory, fits=fits),
    )
    return Candidate(f"rule {number}", 1, 1, made)


_TIME = st.floats(1e-6, 10.0)


@settings(deadline=None, max_examples=25)
@given(rows=st.lists(st.tuples(_TIME, _TIME, st.booleans()), max_size=6))
def test_candidates_that_fit_are_in_the_order_of_their_expected_times(
    plan: SlicePlan, rows: list[tuple[float, float, bool]]
) -> None:
    candidates = [_candidate(plan, row, number) for number, row in enumerate(rows)]
    sweep = Sweep("job", "v5e:1x1", 8, tuple(candidates))
    fitting = sorted((row[1], number) for number, row in enumerate(rows) if row[2])
    others = [number for number, row in enumerate(rows) if not row[2]]
    wanted = [f"rule {number}" for number in [n for _, n in fitting] + others]
    assert [c.rules for c in sweep.ranked] == wanted
    best = candidates[fitting[0][1]].plan if fitting else None
    assert sweep.best is best
    text = str(sweep)
    assert "Ranked by expected time" in text
    assert all(seconds(expected) in text for expected, _ in fitting)


def test_a_plan_without_an_expected_time_has_its_predicted_time(plan: SlicePlan) -> None:
    assert plan.times is not None
    without = dataclasses.replace(plan, expected=None)
    assert Candidate("rule", 1, 1, without).seconds == plan.times.predicted
    assert Candidate("rule", 1, 1, None, "no rules").seconds is None
