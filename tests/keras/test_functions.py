"""Variables of Keras in a `jaxdist.function`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ContextError
from tests.keras.models import make_strategy
from tests.strategies.oracle import refused


def test_a_step_in_a_function_reads_and_assigns_a_variable_in_each_call() -> None:
    strategy = make_strategy(2)
    variable = keras.Variable(1.0)

    @jaxdist.function
    def call(x: Any) -> Any:
        def step(x: Any) -> None:
            total = jaxdist.get_replica_context().all_reduce("sum", x)
            variable.assign_add(total)

        strategy.run(step, (x,))
        # The step has made it an input of the function.
        return variable.value * 10

    found = [float(call(np.float32(1))) for _ in range(3)]
    assert found == [30, 50, 70]
    assert float(variable.value) == 7
    variable.assign(0.0)
    assert float(call(np.float32(1))) == 20


@pytest.mark.parametrize(
    ("what", "use"),
    [("read", lambda v: v.value + 1), ("assigned", lambda v: v.assign(2.0))],
)
def test_a_variable_that_no_step_uses_is_refused_in_a_function(
    what: str, use: Callable[[Any], Any]
) -> None:
    make_strategy(2)
    variable = keras.Variable(1.0)
    with refused(ContextError, f"was {what} in a jaxdist.function", "outside of the function"):
        jaxdist.function(lambda: use(variable))()
    assert float(variable.value) == 1
