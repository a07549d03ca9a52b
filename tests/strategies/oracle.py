"""Reading results apart from the code under test, and making values of replicas."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Strategy, _replica
from jaxdist.errors import JaxdistError


def per_replica(strategy: Strategy, make: Callable[[int], Any]) -> PerReplica:
    """A value of which replica `r` has `make(r)`."""
    return PerReplica([make(r) for r in range(strategy.num_replicas_in_sync)])


def placed(strategy: Strategy, value: Any) -> jax.Array:
    """`value`, whole on every device of the strategy."""
    return jax.device_put(value, strategy.replicated_sharding)


def split(strategy: Strategy, value: Any) -> jax.Array:
    """`value`, its rows split over the replicas."""
    return jax.device_put(value, strategy.per_replica_sharding)


def of_this_process(strategy: Strategy, listed: Sequence[Any]) -> list[Any]:
    """The entries of the replicas of this process, of a list with one for each replica."""
    assert len(listed) == strategy.num_replicas_in_sync
    return [listed[replica] for replica in strategy.layout.local_replicas]


def each(strategy: Strategy, value: Any) -> list[Any]:
    """The value that each replica of this process has, read from the devices."""
    count = len(strategy.layout.local_replicas)
    if isinstance(value, PerReplica):
        held = [np.asarray(v) for v in value.values]
        assert len(held) == count
        return held
    if isinstance(value, jax.Array):
        copies = [np.asarray(s.data) for s in value.addressable_shards]
        assert value.is_fully_replicated
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
        return [copies[0]] * count
    return [value] * count


def assert_each(strategy: Strategy, value: Any, expected: list[Any], rtol: float = 1e-6) -> None:
    """Every replica has what the list says, with the right shape."""
    found = each(strategy, value)
    for have, want in zip(found, of_this_process(strategy, expected), strict=True):
        np.testing.assert_allclose(have, want, rtol=rtol)
        assert np.shape(have) == np.shape(want)


def is_plain(value: Any) -> bool:
    """Whether a result is one array and not a value for each replica."""
    return isinstance(value, jax.Array) and not isinstance(value, PerReplica)


def is_free(value: jax.Array) -> bool:
    """Whether an array follows the others that it is combined with, being tied to no device."""
    elsewhere = jax.local_devices()[-1]
    there = value.reshape(-1)[:1] + jax.device_put(np.ones(1, value.dtype), elsewhere)
    return bool(there.devices() == {elsewhere})


@contextlib.contextmanager
def refused(error: type[JaxdistError], *parts: str) -> Iterator[pytest.ExceptionInfo[JaxdistError]]:
    """The block raises exactly `error`, says all the `parts`, and leaves the context as it was."""
    before = _replica.current_frame()
    with pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error or issubclass(type(caught.value), error)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is missing from:\n{message}"
    assert _replica.current_frame() is before


def where() -> tuple[Any, bool, Any, bool]:
    """A row of the table of contexts."""
    return (
        jaxdist.get_strategy(),
        jaxdist.has_strategy(),
        jaxdist.get_replica_context(),
        jaxdist.in_cross_replica_context(),
    )
