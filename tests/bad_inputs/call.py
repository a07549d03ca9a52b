"""One valid call of a public callable, whose arguments are then made wrong one by one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist


@dataclasses.dataclass(frozen=True)
class Call:
    """How to call a public callable, with arguments that it takes.

    Args:
        fn: Called once for each call; returns what is called.
        arguments: Called once for each call; returns valid arguments by name.
        use: What is done with the result, where mistakes show only then.
    """

    fn: Callable[[], Callable[..., Any]]
    arguments: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any], Any] = lambda result: result


@functools.cache
def strategy() -> jaxdist.MirroredStrategy:
    """A strategy of two replicas, which all calls share."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def identity(value: Any) -> Any:
    """A step that any value goes through."""
    return value


def per_replica() -> jaxdist.PerReplica:
    """A value of each replica of `strategy()`."""
    return jaxdist.PerReplica([np.float32(1), np.float32(2)])


def rows() -> jaxdist.PerReplica:
    """Two rows of each replica of `strategy()`."""
    return jaxdist.PerReplica([np.ones(2, np.float32), np.zeros(2, np.float32)])


def in_replica(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A function that is called in a step of `strategy()`, with what it is given."""

    def call(**arguments: Any) -> Any:
        def step(_: Any) -> Any:
            return fn(**arguments)

        return strategy().run(step, (jnp.float32(1),))

    return lambda: call


def of_replica(method: str) -> Callable[[], Callable[..., Any]]:
    """A method of the replica context, called in a step."""
    return in_replica(
        lambda **arguments: getattr(jaxdist.get_replica_context(), method)(**arguments)
    )


def in_scope(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A function that is called in the scope of `strategy()`."""

    def call(**arguments: Any) -> Any:
        with strategy().scope():
            return fn(**arguments)

    return lambda: call


def variable() -> jaxdist.Variable:
    """A variable of `strategy()`."""
    with strategy().scope():
        return jaxdist.Variable(jnp.zeros(3), aggregation=jaxdist.VariableAggregation.SUM)


def entered(manager: Any) -> None:
    """Enter a context manager and leave it."""
    with manager:
        pass


def cpu_devices() -> list[jax.Device]:
    """The devices of `strategy()`."""
    return list(jax.devices("cpu")[:2])
