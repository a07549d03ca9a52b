"""Bounded staleness: a worker that is ten times as slow, by the log of versions of its server."""

import pathlib
from collections import Counter

import pytest

from tests.parameter_server.faults import slow_worker
from tests.parameter_server.faults.slow_worker import Found
from tests.parameter_server.strategy.making import make_strategy
from tests.parameter_server.tasks.cluster import make_cluster

SCRIPT = pathlib.Path(slow_worker.__file__)
STEPS, WORKERS = 120, 3
BOUNDS = (0, 1, 4, None)


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_applied_update_is_staler_than_max_staleness_with_one_worker_slowed_ten_times(
    bound: int | None,
) -> None:
    _check(slow_worker.run(make_strategy(1, WORKERS, max_staleness=bound), STEPS), bound)


@pytest.mark.slow
def test_no_applied_update_is_staler_than_max_staleness_where_the_slow_worker_is_a_process() -> (
    None
):
    names = {"any" if bound is None else str(bound): bound for bound in BOUNDS}
    with make_cluster(str(STEPS), *names, script=SCRIPT, workers=WORKERS) as cluster:
        chief = cluster.start_all()
        for name, bound in names.items():
            end = chief.wait_for(f"end of {name}")
            end.pop("event")
            # Keys of JSON are texts.
            end["staleness"] = {int(k): v for k, v in end["staleness"].items()}
            _check(Found(**end), bound)
        assert chief.process.wait(60) == 0


def _check(found: Found, bound: int | None) -> None:
    staleness = found.list_staleness()
    assert min(staleness) >= 0
    if bound is None:
        # So the other bounds have something to do.
        assert max(staleness) > max(n for n in BOUNDS if n is not None)
    else:
        assert max(staleness) <= bound
    # The slow worker took part, and the others did more.
    assert 0 < sum(found.by_slow) < STEPS / 2
    assert sorted(found.numbers) == list(range(STEPS))
    assert found.counts == {"scheduled": STEPS, "applied": STEPS, "lost": 0}
    assert found.staleness == Counter(staleness)
