"""Errors of a step name the public call that the user made."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Strategy, training
from jaxdist.errors import JaxdistError


class _Holder:
    """Holds an array and is not a pytree."""

    def __init__(self) -> None:
        self.array = jnp.zeros(3)


def _number() -> jax.Array:
    replica: Any = jaxdist.get_replica_context()
    return jnp.float32(replica.replica_id_in_sync_group)


def _diverge(model: nnx.Linear, x: jax.Array) -> None:
    model.kernel[...] += _number()


def _return_ranks(x: jax.Array) -> jax.Array:
    return x if x.shape[0] == 2 else x.sum()


_UNEVEN = PerReplica([np.zeros(2, np.float32), np.zeros(3, np.float32)])

# The name of the faulty argument or result, the step, its arguments.
_FAULTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "state that differs": (_diverge, lambda: (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), jnp.ones(2))),
    "an array that is hidden": (lambda x: x, lambda: (_Holder(),)),
    "a mutable array": (lambda x: x[...], lambda: (jax.new_ref(jnp.zeros(2)),)),
    "a variable of Flax": (lambda x: x[...], lambda: (nnx.Param(jnp.zeros(2)),)),
    "fields": (lambda x: x, lambda: (np.zeros(2, [("a", "f4")]),)),
    "keys that have no order": (lambda x: x, lambda: ({1: 0, "a": 1},)),
    "another byte order": (lambda x: x, lambda: (np.zeros(2, ">f4"),)),
    "ranks that differ": (_return_ranks, lambda: (_UNEVEN,)),
    "the wrong number of replicas": (lambda x: x, lambda: (PerReplica([1, 2, 3]),)),
}


def _read_error(fn: Callable[[], Any]) -> str:
    with pytest.raises(JaxdistError) as error:
        fn()
    return str(error.value)


@pytest.fixture
def two() -> Strategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("fault", _FAULTS)
def test_every_call_that_runs_a_step_puts_its_own_name_into_the_errors(
    two: Strategy, fault: str
) -> None:
    step, make = _FAULTS[fault]
    run = _read_error(lambda: two.run(step, make()))
    lowered = _read_error(lambda: two.lower(step, make()))
    older = _read_error(lambda: two.extended.call_for_each_replica(step, make()))
    assert "strategy.lower" not in run
    assert run.replace("strategy.run", "strategy.lower", 1) == lowered
    caller = "StrategyExtended.call_for_each_replica"
    assert run.replace("strategy.run", caller, 1) == older


@pytest.mark.parametrize(
    "fault", [f for f in _FAULTS if f not in ("state that differs", "ranks that differ")]
)
def test_evaluate_names_the_model_and_not_the_argument_of_its_step(
    two: Strategy, fault: str
) -> None:
    _, make = _FAULTS[fault]
    found = _read_error(
        lambda: training.evaluate(
            two,
            lambda model, x, mask: training.weighted_sums({"x": x}, mask),
            make()[0],
            jaxdist.data.batches(np.arange(4.0, dtype=np.float32), 2),
        )
    )
    assert "strategy.run" not in found.partition("\n")[0]
    assert "args[0]" not in found.partition("\n")[0]
    assert "model" in found.partition("\n")[0]


def test_evaluate_names_sums_fn_where_its_result_is_wrong(two: Strategy) -> None:
    data = jaxdist.data.batches(np.arange(4.0, dtype=np.float32), 2)

    def sums_fn(model: Any, x: jax.Array, mask: jax.Array) -> Any:
        return {1: x.sum(), "a": mask.sum()}

    found = _read_error(lambda: training.evaluate(two, sums_fn, 1.0, data))
    assert found.startswith("training.evaluate called sums_fn, and it returned result, a dict ")
