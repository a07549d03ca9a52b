"""Numbers of less than a byte: valid if all replicas have the same, refused otherwise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdist import (
    MirroredStrategy,
    NcclAllReduce,
    OneDeviceStrategy,
    PerReplica,
    RunOptions,
    get_replica_context,
)
from jaxdist.errors import ArgumentTypeError, ReplicaValueError

ROWS = [np.array([1, 0, 1, r % 2], ml_dtypes.int4) for r in range(8)]


def _of_small() -> Any:
    return get_replica_context().all_reduce("sum", jnp.ones(3, ml_dtypes.float4_e2m1fn))


CALLS: dict[str, Callable[[MirroredStrategy], Any]] = {
    "argument": lambda s: s.run(lambda x: x, (PerReplica(ROWS),)),
    "result": lambda s: s.run(lambda: jnp.full(2, _number(), ml_dtypes.int4)),
    "all_reduce": lambda s: s.run(_of_small),
    "all_gather": lambda s: s.run(
        lambda: get_replica_context().all_gather(jnp.ones(3, ml_dtypes.uint4), axis=0)
    ),
    "reduce": lambda s: s.reduce("SUM", PerReplica(ROWS), axis=None),
    "gather": lambda s: s.gather(PerReplica(ROWS), axis=0),
    "cross_device_ops": lambda s: NcclAllReduce().reduce("SUM", PerReplica(ROWS), "cpu:0"),
}


def _number() -> Any:
    return get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize("name", CALLS)
def test_values_of_replicas_are_refused_with_the_cast(name: str) -> None:
    with pytest.raises((ArgumentTypeError, ReplicaValueError)) as told:
        CALLS[name](MirroredStrategy())
    cause = f"{told.value} {told.value.__cause__}"
    assert "less than a byte" in cause
    assert "astype('int8')" in cause or "astype('float16')" in cause


def test_weights_of_four_bits_that_all_replicas_have_work() -> None:
    weights = jnp.arange(4).astype(ml_dtypes.int4)
    x = PerReplica([np.full(4, r, np.float32) for r in range(8)])
    found = MirroredStrategy().run(lambda w, x: x * w.astype(jnp.float32), (weights, x))
    assert found.values[3].tolist() == [0, 3, 6, 9]
    assert OneDeviceStrategy("cpu:0").run(lambda w: w, (weights,)).dtype == ml_dtypes.int4


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_weights_of_four_bits_that_lie_on_all_devices_work(donated: tuple[int, ...]) -> None:
    strategy = MirroredStrategy()
    weights = jax.device_put(jnp.arange(5).astype(ml_dtypes.int4), strategy.layout.replicated)
    options = RunOptions(donate_argnums=donated)

    def step(w: Any, x: Any, unused: Any) -> Any:
        return (w + 1).astype(ml_dtypes.int4), x * w.astype(jnp.float32)

    for turn in range(3):
        weights, found = strategy.run(step, (weights, 2.0, jnp.ones(3)), options=options)
        assert np.asarray(found).tolist() == [2.0 * (n + turn) for n in range(5)]
