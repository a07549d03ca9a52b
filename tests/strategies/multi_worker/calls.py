"""Calls of a strategy over several processes that are refused, or that one process makes alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import JaxdistError


def refuse() -> dict[str, str]:
    """Return the class and the message of the error of each call."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    extended = strategy.extended
    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    other = extended.worker_devices[1 - jax.process_index()]

    def run_op_by_op() -> Any:
        with jaxdist.config.run_eagerly():
            return strategy.run(lambda x: x, (x,))

    def find_nan() -> Any:
        with jax.debug_nans(True):
            return strategy.run(lambda x: jnp.log(x - 5), (x,))

    def merge(strategy: jaxdist.Strategy, _: Any) -> Any:
        return strategy.experimental_local_results(x)

    calls: dict[str, Callable[[], Any]] = {
        "op by op": run_op_by_op,
        "nan": find_nan,
        "gradients": lambda: strategy.check_gradients(lambda x: 2 * x, (x,)),
        "device of another process": lambda: extended.reduce_to("sum", x, other),
        "list of it": lambda: extended.broadcast_to(1.0, [other]),
        "captured": lambda: strategy.run(lambda y: _context().merge_call(merge, (y,)), (x,)),
        "own values in a trace": lambda: jax.jit(
            lambda a: strategy.run(lambda x: x, (PerReplica([a]),)).array
        )(1.0),
        "other ranks": lambda: strategy.run(
            lambda x: x, (PerReplica([np.ones((2, 1)), np.ones(2)]),)
        ),
        "too large": lambda: strategy.run(lambda x: x, (PerReplica([2**40, 2**40]),)),
    }
    return {name: _describe_error(call) for name, call in calls.items()}


def compute() -> dict[str, Any]:
    """Return results of calls that take values apart, in traces too."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    listed = PerReplica([np.float32(1), np.float32(2)])

    def total(x: Any) -> Any:
        return strategy.reduce("sum", strategy.run(lambda x: 10 * x, (x,)), axis=None)

    with strategy.scope():
        v = jaxdist.Variable(0.0)
        own = jaxdist.Variable(
            0.0,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )

    @jaxdist.function
    def assign(x: Any) -> Any:
        v.assign_add(2.0)
        own.assign(6.0)
        return v.value() + x

    # Each strategy compares the arguments of its own calls.
    for i in range(5):
        made = jaxdist.MultiWorkerMirroredStrategy()
        for _ in range(i + 1):
            made.run(lambda x, i=i: x + i, (listed,))
    rows = strategy.run(lambda x: jnp.stack([x, -x]), (listed,))
    return {
        "function of listed values": float(jaxdist.function(total)(listed)),
        "listed values in jit": float(jax.jit(lambda: total(listed))()),
        "traced values in jit": float(jax.jit(lambda a, b: total(PerReplica([a, b])))(1.0, 2.0)),
        "gather in jit": jax.jit(lambda x: strategy.gather(x, 0))(rows).tolist(),
        "assigned": [float(assign(1.0)), float(v.value()), float(own.value())],
        "devices": strategy.extended.worker_devices,
    }


def _context() -> jaxdist.ReplicaContext:
    context = jaxdist.get_replica_context()
    assert context is not None
    return context


def _describe_error(call: Callable[[], Any]) -> str:
    try:
        return f"no error, but {call()!r}"
    except JaxdistError as error:
        return f"{type(error).__name__}: {error}"
