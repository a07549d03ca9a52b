"""Calls that the processes of a job make with something else in each of them."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import JaxdistError, OtherProcessError
from jaxdist.training import run_loop

_PATIENCE = 20.0
_STEPS_BEFORE = 3


def differ() -> dict[str, str]:
    """Return the class and the message of the error of each call."""
    index = jaxdist.MultiWorkerMirroredStrategy().layout.process.index
    longer = jaxdist.experimental.CommunicationOptions(timeout_seconds=1e6)

    def step(a: Any) -> Any:
        return a + 1

    def run_others_later(strategy: jaxdist.Strategy) -> None:
        # Later calls are compared once a second.
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            strategy.run(step, (np.float32(index),))
            # The processes stay close to each other, as they do if a step has a collective.
            time.sleep(0.005)

    def reduce(strategy: jaxdist.Strategy, op: str, **how: Any) -> Any:
        return strategy.reduce(op, PerReplica([1.0]), axis=None, **how)

    def reduce_lists(strategy: jaxdist.Strategy) -> Any:
        total = strategy.reduce("sum", PerReplica([[1.0, index]]), axis=None)
        rows = strategy.gather(PerReplica([[index] * (1 + index)]), axis=0)
        return total.tolist(), rows.tolist()

    own = PerReplica([np.zeros(2, ["int32", "float32"][index])])
    own_options = jaxdist.RunOptions(
        compiler_options={"xla_cpu_prefer_vector_width": [128, 256][index]}
    )
    own_program = jaxdist.RunOptions(saved_program=[None, "missing.program"][index])
    calls: dict[str, Callable[[jaxdist.Strategy], Any]] = {
        "values": lambda s: s.run(lambda a: a, (np.float32(index),)),
        "shapes": lambda s: s.run(lambda a: a, (np.zeros(1 + index),)),
        "dtypes": lambda s: s.run(lambda a: a, (own,)),
        "calls": lambda s: reduce(s, ["sum", "mean"][index]),
        "compiler options": lambda s: s.run(step, (np.float32(0),), options=own_options),
        "saved program": lambda s: s.run(lambda a: a + 1, (np.float32(0),), options=own_program),
        "lists": reduce_lists,
        "too long": lambda s: reduce(s, "sum", options=longer),
        "values later": run_others_later,
    }
    found: dict[str, str] = {}
    for name, call in calls.items():
        strategy = jaxdist.MultiWorkerMirroredStrategy()
        # The arguments of the first, second and fourth call are noted for a comparison.
        for _ in range(2):
            strategy.run(step, (np.float32(0),))
        found[name] = _describe_error(call, strategy)
    return found


def _describe_error(call: Callable[[jaxdist.Strategy], Any], strategy: jaxdist.Strategy) -> str:
    try:
        return f"no error, but {call(strategy)!r}"
    except JaxdistError as error:
        return f"{type(error).__name__}: {error}"


def loop_until_one_leaves(where: str) -> dict[str, Any]:
    """Train in a loop that process 1 leaves, in a step, in `reduce` or while a batch is read."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    is_leaver = jax.process_index() == 1

    def leave(place: str, number: int) -> None:
        if is_leaver and place == where and number == _STEPS_BEFORE:
            sys.exit(0)

    def step(number: int, batch: Any) -> tuple[int, Any]:
        leave("reduce", number)
        total = strategy.reduce("sum", batch, axis=0)
        return number + 1, total

    def read() -> Iterator[Any]:
        for number in range(10):
            leave("batch", number)
            yield np.full(2, number, "float32")

    batches = strategy.experimental_distribute_dataset(read)
    try:
        end = run_loop(0, step, batches)
    except OtherProcessError as error:
        return {"error": type(error).__name__, "processes": error.processes}
    return {"error": None, "steps": end.step}
