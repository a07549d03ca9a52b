"""The loop, and Ctrl-C in it."""

import signal

import pytest

from jaxdist.errors import ArgumentError
from jaxdist.training import Every, run_loop


def _add(state: int, x: int) -> tuple[int, int]:
    return state + x, x


def test_the_loop_ends_with_the_data_and_counts_on_from_the_first_step() -> None:
    outputs: list[tuple[int, int]] = []
    end = run_loop(
        100, _add, [1, 2, 3], on_output=lambda s, o: outputs.append((s, o)), first_step=7
    )
    assert (end.state, end.step, end.was_interrupted) == (106, 10, False)
    assert outputs == [(8, 1), (9, 2), (10, 3)]


def test_actions_run_after_their_steps_in_the_order_given() -> None:
    seen: list[tuple[str, int, int]] = []
    actions = [
        Every(2, lambda step, state: seen.append(("a", step, state))),
        Every(3, lambda step, state: seen.append(("b", step, state))),
    ]
    run_loop(0, _add, [1] * 6, actions=actions)
    assert seen == [("a", 2, 2), ("b", 3, 3), ("a", 4, 4), ("a", 6, 6), ("b", 6, 6)]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_ctrl_c_in_the_kth_step_is_reported_with_the_steps_before_it(k: int) -> None:
    acted: list[int] = []

    def step(state: int, x: int) -> tuple[int, int]:
        if x == k:
            signal.raise_signal(signal.SIGINT)
        return _add(state, x)

    action = Every(1, lambda step, _: acted.append(step))
    end = run_loop(0, step, [1, 2, 3, 4], actions=[action])
    assert end.was_interrupted
    assert end.step == k - 1
    assert acted == list(range(1, k))


def test_ctrl_c_in_an_action_ends_the_loop_and_runs_no_other_action() -> None:
    acted: list[str] = []

    def stop(step: int, state: int) -> None:
        raise KeyboardInterrupt

    actions = [Every(2, stop), Every(1, lambda step, _: acted.append(f"after {step}"))]
    end = run_loop(0, _add, [1] * 5, actions=actions)
    assert (end.step, end.was_interrupted) == (2, True)
    assert acted == ["after 1"]


def test_an_action_that_never_comes_is_refused_before_the_first_step() -> None:
    def step(state: int, x: int) -> tuple[int, int]:
        raise AssertionError

    with pytest.raises(ArgumentError, match="num_steps=0"):
        run_loop(0, step, [1], actions=[Every(0, lambda s, x: None)])


def test_an_error_of_the_step_is_not_caught() -> None:
    def step(state: int, x: int) -> tuple[int, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_loop(0, step, [1])
