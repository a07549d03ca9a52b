"""How scheduled functions change variables of NNX modules that no optimizer updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist._parameter_server.coordinator import ClusterCoordinator
from jaxdist._parameter_server.protocol import ChangeVariables
from jaxdist._parameter_server.strategy.parameter_server import ParameterServerStrategy
from tests.parameter_server.strategy.making import make_resolver, make_strategy
from tests.parameter_server.wrapping import wrap


class _Holder(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.value = nnx.Variable(jnp.asarray(value))


def _keep_least(held: _Holder, x: Any) -> None:
    held.value[...] = jnp.minimum(held.value[...], x)


def _reset(held: _Holder, x: Any) -> None:
    held.value[...] = jnp.where(x > 4, 0.5, held.value[...])


def _write_rows(held: _Holder, x: Any) -> None:
    held.value[...] = held.value[...].at[0].set(x)


def _normalize(held: _Holder, x: Any) -> None:
    new = held.value[...] + x
    held.value[...] = new / jnp.linalg.norm(new)


def _mark(held: _Holder, x: Any) -> None:
    held.value[...] = held.value[...] | (x > 4)


def _add(held: _Holder, x: Any) -> None:
    held.value[...] += x


def _add_rows(held: _Holder, x: Any) -> None:
    held.value[...] = held.value[...].at[jnp.array([0, 2])].add(x)


def _add_sometimes(held: _Holder, x: Any) -> None:
    held.value[...] = jax.lax.cond(x > 2, lambda v: v + x, lambda v: v, held.value[...])


def _average(held: _Holder, x: Any) -> None:
    held.value[...] = 0.75 * held.value[...] + 0.25 * jax.lax.stop_gradient(x)


def _average_in_float32(held: _Holder, x: Any) -> None:
    new = 0.75 * held.value[...].astype(jnp.float32) + 0.25 * x
    held.value[...] = new.astype(jnp.bfloat16)


_ASSIGNED: dict[str, tuple[Any, Callable[..., None]]] = {
    "a minimum": (np.float32(np.inf), _keep_least),
    "a reset": (np.float32(1e8), _reset),
    "rows": (np.full(3, 1e8, "float32"), _write_rows),
    "a normalized vector": (np.ones(4, "float32"), _normalize),
    "a mark": (np.array([False, True]), _mark),
}
_ADDED: dict[str, tuple[Any, Callable[..., None]]] = {
    "a sum": (np.float32(0), _add),
    "a sum of bfloat16": (jnp.zeros(2, jnp.bfloat16), lambda held, x: _add(held, jnp.bfloat16(x))),
    "a sum of infinities": (np.array([np.inf, -np.inf, 1], "float32"), _add),
    "sums of rows": (np.zeros(4, "float32"), _add_rows),
    "a sum in a branch": (np.float32(0), _add_sometimes),
    "an average": (np.ones(3, "float32"), _average),
    "an average of bfloat16": (jnp.ones(3, jnp.bfloat16), _average_in_float32),
}


def _note_changes(strategy: Any) -> list[str]:
    """Return a list that gets the operation of each change that is sent from now on."""
    found: list[str] = []

    def note(request: ChangeVariables, go_on: Callable[[], Any]) -> Any:
        found.extend(change.op for change in request.changes)
        return go_on()

    for link in strategy.storage.links:
        link.call = wrap(link.call, ChangeVariables, note)
    return found


@pytest.mark.parametrize("what", [*_ASSIGNED, *_ADDED])
def test_one_worker_writes_the_values_of_the_function(what: str) -> None:
    start, fn = {**_ASSIGNED, **_ADDED}[what]
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    held, alone = _Holder(start), _Holder(start)
    coordinator.schedule(fn, (held, np.float32(1))).fetch()
    fn(alone, np.float32(1))
    sent = _note_changes(strategy)
    for x in (3, 5, 2):
        coordinator.schedule(fn, (held, np.float32(x))).fetch()
        fn(alone, np.float32(x))
    new, want = (np.asarray(x.value[...]).astype("float32") for x in (held, alone))
    np.testing.assert_allclose(new, want, rtol=1e-2 if "bfloat16" in what else 1e-6)
    assert set(sent) == {"assign" if what in _ASSIGNED else "add"}


def _reset_where(held: _Holder, done: Any) -> None:
    held.value[...] = held.value[...] * (1 - done) + done * 0.5


@pytest.mark.parametrize("start", [1e8, -3e30, 1e-30, 7.25])
def test_a_weight_of_0_keeps_nothing_of_the_old_value(start: float) -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    held = _Holder(np.full(3, start, "float32"))
    done = np.array([1, 0, 1], "float32")
    coordinator.schedule(_reset_where, (held, done)).fetch()
    wanted = np.array([0.5, start, 0.5], "float32")
    np.testing.assert_array_equal(np.asarray(held.value[...]), wanted)


def test_a_weight_of_1_undoes_nothing_that_others_have_added() -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    held = _Holder(np.float32(1e8))

    coordinator.schedule(_reset_where, (held, np.float32(0))).fetch()
    before = np.asarray(held.value[...])
    sent = _note_changes(strategy)
    coordinator.schedule(_reset_where, (held, np.float32(0))).fetch()
    assert np.asarray(held.value[...]) == before
    # An assignment would write the value that the function has read.
    assert sent == ["add"]


def test_what_is_lost_by_rounding_is_sent_only_where_it_matters() -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    held = _Holder(np.full(3, 1e8, "float32"))
    coordinator.schedule(_average, (held, np.float32(3))).fetch()
    coordinator.schedule(_reset_where, (held, np.zeros(3, "float32"))).fetch()
    sent = _note_changes(strategy)
    coordinator.schedule(_average, (held, np.float32(3))).fetch()
    assert sent == ["add"]
    coordinator.schedule(_reset_where, (held, np.ones(3, "float32"))).fetch()
    assert sent == ["add"] * 3


def test_a_moving_average_over_replicas_is_added() -> None:
    strategy = ParameterServerStrategy(make_resolver(workers=1, num_accelerators={"CPU": 2}))
    coordinator = ClusterCoordinator(strategy)
    norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    sent: list[list[str]] = []
    x = np.arange(32, dtype="float32").reshape(8, 4)
    batch = jax.device_put(x, strategy.per_replica_sharding)

    def step(norm: Any, batch: Any) -> Any:
        return strategy.run(lambda norm, x: norm(x).sum(), (norm, batch))

    for _ in range(2):
        coordinator.schedule(step, (norm, batch)).fetch()
        sent.append(_note_changes(strategy))
    np.testing.assert_allclose(np.asarray(norm.mean[...]), 0.75 * x.mean(axis=0), rtol=1e-6)
    assert set(sent[0]) == {"add"}


def test_the_variables_of_welford_change_together() -> None:
    strategy = ParameterServerStrategy(make_resolver(workers=1, num_accelerators={"CPU": 2}))
    coordinator = ClusterCoordinator(strategy)
    metric, alone = nnx.metrics.Welford(), nnx.metrics.Welford()
    values = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    sent: list[list[str]] = []

    def step(metric: Any, batch: Any) -> Any:
        # How replicas combine their moments is no weighted sum of the old ones.
        return strategy.run(lambda metric, x: metric.update(values=x), (metric, batch))

    for row in values:
        batch = jax.device_put(row, strategy.per_replica_sharding)
        coordinator.schedule(step, (metric, batch)).fetch()
        sent.append(_note_changes(strategy))
    alone.update(values=values.ravel())
    found, want = metric.compute(), alone.compute()
    np.testing.assert_allclose(found.mean, want.mean, rtol=1e-5)
    np.testing.assert_allclose(found.standard_deviation, want.standard_deviation, rtol=1e-5)
    assert set(sent[0]) == {"add"}


def test_layers_of_a_vmap_have_random_keys_of_their_own() -> None:
    class Layers(nnx.Module):
        def __init__(self) -> None:
            make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
            self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    coordinator = ClusterCoordinator(make_strategy())
    layers = Layers()
    found = [coordinator.schedule(lambda m: m(jnp.ones(200)), (layers,)).fetch() for _ in range(2)]
    assert len({row.tobytes() for masks in found for row in masks}) == 6
