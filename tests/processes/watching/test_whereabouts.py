"""What the threads of a process are doing, in memory."""

import threading
import time

import pytest

from jaxdist._processes import CallOfAll
from jaxdist._processes.watching.whereabouts import OUTSIDE, Whereabouts


def test_places_nest_and_keep_the_step() -> None:
    here = Whereabouts()
    here.enter("merge", step=3)
    here.enter("reduce", in_wait=True)
    assert (here.read().place, here.read().step, here.read().in_wait) == ("reduce", 3, True)
    here.leave()
    assert (here.read().place, here.read().in_wait) == ("merge", False)
    here.leave()
    assert (here.read().place, here.read().step) == (OUTSIDE, 3)
    here.enter("run", step=4)
    here.leave()
    assert here.read().step == 4


def test_the_time_outside_begins_when_the_last_place_ends() -> None:
    here = Whereabouts()
    here.enter("run")
    inside = here.read().since
    here.leave()
    assert inside <= here.read().since <= time.monotonic()
    assert here.read().since > inside


def test_the_main_thread_is_read_once_it_has_begun_something() -> None:
    here = Whereabouts()

    def run_in_thread(do: str) -> None:
        thread = threading.Thread(target=lambda: here.enter(do, in_wait=True))
        thread.start()
        thread.join()

    run_in_thread("wait")
    assert here.read().place == "wait"
    here.enter("run")
    here.leave()
    run_in_thread("wait")
    # A background thread that waits does not hide that the main thread computes.
    assert (here.read().place, here.read().in_wait) == (OUTSIDE, False)


def test_the_next_wait_ends_the_blame() -> None:
    here = Whereabouts()
    here.blame([1])
    here.enter("run")
    assert here.blames == (1,)
    here.enter("reduce", in_wait=True)
    assert here.blames is None


def test_calls_of_one_kind_are_numbered() -> None:
    gathers = CallOfAll("gather")
    assert [gathers.name_next() for _ in range(2)] == ["gather (call 1)", "gather (call 2)"]


def test_entering_and_leaving_costs_less_than_many_microseconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = Whereabouts()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            here.enter("reduce", 3, True)
            here.leave()
        times.append(time.perf_counter() - began)
    with capsys.disabled():
        print(f"\nenter and leave: {min(times) * 1e6:.0f} ns")
    # A request to the store or a lock would cost more than this; the machine may be busy.
    assert min(times) < 0.05
