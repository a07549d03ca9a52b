"""The training loop: it calls a step for each batch, and callbacks between steps."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jaxdist._called import called, refuse_type
from jaxdist._checkpoints import save_after
from jaxdist._validate import as_integer, as_iterator, as_list, check_callable, show
from jaxdist.errors import OtherProcessError

_ACTIONS = ("a list of training.Every", "Pass for instance actions=[training.Every(100, save)].")
_DATA = "Pass for instance a list of batches, or a distributed dataset."

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Every(Generic[S]):
    """An action after every `num_steps`-th step.

    Attributes:
        num_steps: A number n: the action runs after steps n, 2n, 3n, ...
        act: The callback, `(step, state) -> None`.
    """

    num_steps: int
    act: Callable[[int, S], None]

    @called("training.Every")
    def __post_init__(self) -> None:
        as_integer("num_steps", self.num_steps, least=1)
        check_callable(self.act, "act", "Pass a function: Every(100, save).")


@dataclasses.dataclass(frozen=True)
class LoopEnd(Generic[S]):
    """The result of a loop.

    Attributes:
        state: The state after the last step. After an interrupt, state that a step updates in
            place may be partly updated: do not save or use it.
        step: The number of completed steps, from the start of training.
        was_interrupted: Whether Ctrl-C ended the loop.
    """

    state: S
    step: int
    was_interrupted: bool


@called("training.run_loop")
def run_loop(
    state: S,
    step_fn: Callable[[S, Any], tuple[S, Any]],
    data: Iterable[Any],
    *,
    on_output: Callable[[int, Any], None] | None = None,
    actions: Sequence[Every[S]] = (),
    first_step: int = 0,
) -> LoopEnd[S]:
    """Call a step for each batch, and run actions every n steps.

    Cost:
        The loop does not wait for results: it dispatches steps ahead of the devices until an
        action or `on_output` reads a result. No collective.

    Guarantees:
        Ctrl-C ends the loop, and the result reports it. No action runs after it.
        Actions run in the given order, and only between steps.

    Args:
        state: The state before the first step.
        step_fn: `(state, batch) -> (state, out)`. Usually it calls `strategy.run`.
        data: The batches. The loop ends after the last one.
        on_output: Called with `(step, out)` after every step, before the actions.
        actions: The actions.
        first_step: The number of steps that earlier runs completed.

    Returns:
        The state, the number of completed steps, and whether Ctrl-C ended the loop.

    Raises:
        ArgumentError: `first_step` is below 0.
        ArgumentTypeError: An argument has the wrong type, or `step_fn` does not return a pair.
        OtherProcessError: Another process has ended, or did not answer in time. The state that
            `Checkpoints.on_failure` has registered is saved first.

    Example:
        >>> seen = []
        >>> log = Every(2, lambda step, state: seen.append((step, state)))
        >>> end = run_loop(0, lambda s, x: (s + x, None), range(5), actions=[log])
        >>> end.state, end.step, seen
        (10, 5, [(2, 1), (4, 6)])
    """
    check_callable(step_fn, "step_fn", "Pass a function (state, batch) -> (state, out).")
    if on_output is not None:
        check_callable(on_output, "on_output", "Pass a function (step, out), or None.")
    each = as_list("actions", actions, *_ACTIONS, kind=Every)
    step = as_integer("first_step", first_step, least=0)
    try:
        for batch in as_iterator("data", data, "an iterable of batches", _DATA):
            result = step_fn(state, batch)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise refuse_type(
                    f"step_fn, which returned {show(result)}.",
                    "step_fn returns the next state and an output: (state, out).",
                    "Return (state, None) where there is no output.",
                )
            # Count the step before the callbacks: if Ctrl-C interrupts one of them, the step is
            # complete.
            state, out = result
            step += 1
            if on_output is not None:
                on_output(step, out)
            for action in each:
                if step % action.num_steps == 0:
                    action.act(step, state)
    except OtherProcessError as error:
        # The methods of a strategy have done this already; reading a batch or saving has not.
        save_after(error)
        raise
    except KeyboardInterrupt:
        # Return a result, not an exception: the caller needs `step` and the state for its report.
        return LoopEnd(state, step, was_interrupted=True)
    return LoopEnd(state, step, was_interrupted=False)
