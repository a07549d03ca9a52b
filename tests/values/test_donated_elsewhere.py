"""Values whose buffers a step has donated: each use is an error, and the process goes on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import (
    PerReplica,
    RunOptions,
    Strategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)
from jaxdist.errors import DonationError
from tests.strategies.oracle import refused

_DONATES = RunOptions(donate_argnums=(0,))
# Large enough for reductions on the devices.
_SHAPE = (400, 100)


def _add_one(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, x)


def _two() -> Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


# Uses of a result of a step.
OF_RESULTS: dict[str, Callable[[Strategy, Any], Any]] = {
    "Strategy.reduce was given value": lambda s, x: s.reduce("sum", x, axis=None),
    "Strategy.reduce was given value[": lambda s, x: s.reduce("mean", {"a": [x]}, axis=0),
    "Strategy.gather was given value": lambda s, x: s.gather(x, 0),
    "StrategyExtended.reduce_to was given value": lambda s, x: s.extended.reduce_to("sum", x, x),
    "PerReplica.values was read": lambda s, x: s.experimental_local_results(x),
}


@pytest.mark.parametrize("size", [(2,), _SHAPE], ids=str)
@pytest.mark.parametrize("use", OF_RESULTS)
def test_a_donated_result_is_named(use: str, size: tuple[int, ...]) -> None:
    strategy = _two()
    result = strategy.run(_add_one, (PerReplica([np.zeros(size, "float32")] * 2),))
    function = OF_RESULTS[use]
    # A second call takes the path of known calls.
    for _ in range(2):
        function(strategy, result)
    after = strategy.run(_add_one, (result,), options=_DONATES)
    with refused(DonationError, use, f"float32[{2 * size[0]}", "jnp.copy"):
        function(strategy, result)
    total = function(strategy, after)
    assert all(np.all(np.isin(x, (2, 4))) for x in jax.tree.leaves(total))


def _make_variable(strategy: Strategy, synchronization: Any) -> Variable:
    with strategy.scope():
        return Variable(
            np.zeros(_SHAPE, "float32"),
            synchronization=synchronization,
            aggregation=VariableAggregation.MEAN,
        )


# Uses of a variable.
OF_VARIABLES: dict[str, Callable[[Strategy, Variable], Callable[[], Any]]] = {
    "read": lambda s, v: v.read_value,
    "operator": lambda s, v: lambda: v + 1,
    "row": lambda s, v: lambda: v[0],
    "array": lambda s, v: lambda: np.asarray(v),
    "values": lambda s, v: lambda: v.values,
    "assign_add": lambda s, v: lambda: v.assign_add(np.zeros(_SHAPE, "float32")),
    "reduce": lambda s, v: lambda: s.reduce("mean", v, axis=None),
    "local results": lambda s, v: lambda: s.experimental_local_results(v),
    "step": lambda s, v: _keep(s, lambda: v[...] * 2),
    "step that assigns": lambda s, v: _keep(s, lambda: v.assign_add(jnp.zeros(_SHAPE))),
    "function": lambda s, v: jaxdist.function(lambda: s.run(lambda: v[...] * 2)),
}


def _keep(strategy: Strategy, step: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: strategy.run(step)


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("use", OF_VARIABLES)
def test_a_variable_whose_array_was_donated_is_named(use: str, synchronization: str) -> None:
    strategy = _two()
    variable = _make_variable(strategy, VariableSynchronization[synchronization])
    function = OF_VARIABLES[use](strategy, variable)
    for _ in range(2):
        function()
    (held,) = variable.values[:1]
    strategy.run(_add_one, (held,), options=_DONATES)
    with refused(DonationError, f"Variable {variable.name!r} was used", "jnp.copy"):
        function()
    assert "deleted" in repr(variable)
    # A new value is an array of its own.
    variable.assign(np.ones(_SHAPE, "float32"))
    np.testing.assert_array_equal(variable, np.ones(_SHAPE))
    function()


def test_a_donated_array_is_no_value_of_a_variable() -> None:
    strategy = _two()
    variable = _make_variable(strategy, VariableSynchronization.ON_WRITE)
    array = jax.device_put(np.ones(_SHAPE, "float32"), strategy.replicated_sharding)
    strategy.run(_add_one, (array,), options=_DONATES)
    for method in variable.assign, variable.assign_add, variable.assign_sub:
        with refused(DonationError, f"{method.__name__} was given", "buffer is gone"):
            method(array)
    with strategy.scope(), refused(DonationError, "Variable 'v' was given initial_value"):
        Variable(array, name="v")
    np.testing.assert_array_equal(variable, np.zeros(_SHAPE))


def test_a_function_names_a_donated_argument() -> None:
    strategy = _two()
    call = jaxdist.function(lambda x, y: strategy.run(lambda a, b: a * b["c"], (x, y)))
    arrays = [jax.device_put(np.ones(_SHAPE, "float32"), strategy.per_replica_sharding)] * 2
    for _ in range(2):
        call(arrays[0], {"c": arrays[1]})
    donated = jnp.copy(arrays[0])
    call(arrays[0], {"c": donated})
    strategy.run(_add_one, (donated,), options=_DONATES)
    with refused(DonationError, "jaxdist.function", "was given args[1]['c']", "float32[400, 100]"):
        call(arrays[0], {"c": donated})
