"""The loop: state, step, data -> state. It owns nothing else."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jaxdist.errors import ArgumentError

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Every(Generic[S]):
    """Something to do after every `num_steps`-th step.

    Attributes:
        num_steps: After steps 1n, 2n, 3n, ...
        act: `(step, state) -> None`.
    """

    num_steps: int
    act: Callable[[int, S], None]


@dataclasses.dataclass(frozen=True)
class LoopEnd(Generic[S]):
    """How a loop ended.

    Attributes:
        state: The state after the last step. After an interrupt, state that a step updates in
            place may be half-way: do not save or use it.
        step: Steps that were completed, counted from the start of training.
        was_interrupted: Whether Ctrl-C ended it.
    """

    state: S
    step: int
    was_interrupted: bool


def run_loop(
    state: S,
    step_fn: Callable[[S, Any], tuple[S, Any]],
    data: Iterable[Any],
    *,
    on_output: Callable[[int, Any], None] | None = None,
    actions: Sequence[Every[S]] = (),
    first_step: int = 0,
) -> LoopEnd[S]:
    """Step through the data, with things to do every so often.

    Cost:
        Nothing is waited for: steps are dispatched ahead of the devices until an action or
        `on_output` looks at a result. No collective.

    Guarantees:
        Ctrl-C ends the loop and is reported in the result; no action runs after it.
        Actions run in the order given, and only between steps.

    Args:
        state: The state before the first step.
        step_fn: `(state, batch) -> (state, out)`, usually a call of `strategy.run`.
        data: Batches; the loop ends with them.
        on_output: Called with `(step, out)` after every step, before the actions.
        actions: What to do every n steps.
        first_step: Steps that were completed before, in an earlier run.

    Returns:
        The state, the number of steps completed, and whether Ctrl-C ended it.

    Raises:
        ArgumentError: An action's `num_steps` is not positive.

    Example:
        >>> seen = []
        >>> log = Every(2, lambda step, state: seen.append((step, state)))
        >>> end = run_loop(0, lambda s, x: (s + x, None), range(5), actions=[log])
        >>> end.state, end.step, seen
        (10, 5, [(2, 1), (4, 6)])
    """
    for action in actions:
        if action.num_steps < 1:
            raise ArgumentError(
                f"Every(num_steps={action.num_steps}) never comes.\n\nPass 1 or more."
            )
    step = first_step
    try:
        for batch in data:
            state, out = step_fn(state, batch)
            step += 1
            if on_output is not None:
                on_output(step, out)
            for action in actions:
                if step % action.num_steps == 0:
                    action.act(step, state)
    except KeyboardInterrupt:
        return LoopEnd(state, step, was_interrupted=True)
    return LoopEnd(state, step, was_interrupted=False)
