"""`ServerOptimizer`: servers apply an optax transformation to plain variables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import IndexedSlices, training
from jaxdist.coordinator import ClusterCoordinator, ServerOptimizer
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MixedStrategyError,
    ReplicaValueError,
    ShapeError,
    UnsupportedError,
)
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_strategy

_X = np.array([1.0, -2.0, 3.0, 0.5, 2.0], "float32")


def _loss(params: Any, x: Any) -> Any:
    return (params[0] @ x + params[1] - 3.0) ** 2


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize(
    "tx", [optax.sgd(0.01), optax.sgd(0.01, momentum=0.9), optax.adam(0.1)], ids=lambda _: ""
)
def test_one_worker_updates_variables_as_optax_does(tx: Any, shards: int | None) -> None:
    partitioner = None if shards is None else FixedShardsPartitioner(shards)
    strategy = make_strategy(workers=1, variable_partitioner=partitioner)
    coordinator = ClusterCoordinator(strategy)
    params: Any = [np.ones(5, "float32"), np.float32(0)]
    with strategy.scope():
        w, b = (jaxdist.Variable(p) for p in params)
    optimizer = ServerOptimizer(tx, [w, b])
    state = tx.init(params)

    def step(x: Any) -> Any:
        def replica(x: Any) -> Any:
            loss, grads = jax.value_and_grad(_loss)([w.value(), b.value()], x)
            optimizer.apply_gradients(zip(grads, [w, b], strict=True))
            return loss

        return strategy.run(replica, (x,))

    for _ in range(5):
        want, grads = jax.value_and_grad(_loss)(params, _X)
        updates, state = tx.update(grads, state, params)
        params = list(jax.tree.leaves(optax.apply_updates(params, updates)))
        got = coordinator.schedule(step, (_X,)).fetch()
        np.testing.assert_allclose(got, want, rtol=1e-4)
    wanted: Any = params
    np.testing.assert_allclose(w.numpy(), wanted[0], rtol=1e-4)
    np.testing.assert_allclose(b.numpy(), wanted[1], rtol=1e-4)
    if shards is None:
        held = [np.asarray(v) for v in optimizer.slots.values()]
        assert all(any(np.allclose(x, h, rtol=1e-4) for h in held) for x in jax.tree.leaves(state))


def test_updates_of_many_workers_all_count_and_each_optimizer_has_its_own_state() -> None:
    strategy = make_strategy(servers=2, workers=3)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = jaxdist.Variable(np.zeros(2, "float32"))
    one, other = (ServerOptimizer(optax.sgd(1.0, momentum=0.5), [v]) for _ in range(2))

    def step() -> None:
        one.apply_gradients([(jnp.ones(2), v)])

    for _ in range(40):
        coordinator.schedule(step)
    coordinator.join()
    momentum = total = 0.0
    for _ in range(40):
        momentum = 0.5 * momentum + 1
        total -= momentum
    np.testing.assert_allclose(v.numpy(), [total] * 2, rtol=1e-5)
    np.testing.assert_array_equal(next(iter(other.slots.values())).numpy(), [0, 0])
    assert "server_optimizer" in repr(sorted(one.slots))
    assert v.label in repr(one)


def test_gradients_are_applied_here_too_and_none_changes_nothing() -> None:
    strategy = make_strategy()
    with strategy.scope():
        v, w = jaxdist.Variable(1.0), jaxdist.Variable(2.0)
    optimizer = ServerOptimizer(optax.sgd(0.5), [v, w])
    optimizer.apply_gradients([(1.0, v), (None, w)])
    assert (float(v), float(w)) == (0.5, 2.0)
    strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1), v)]))
    assert float(v) == 0


def test_a_function_that_uses_a_variable_after_its_update_is_refused() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = jaxdist.Variable(1.0)
    optimizer = ServerOptimizer(optax.sgd(0.5), [v])

    def update() -> None:
        optimizer.apply_gradients([(jnp.float32(1), v)])

    def read() -> Any:
        update()
        return v.value()

    def assign() -> None:
        update()
        v.assign(3.0, read_value=False)

    def add_in_another_step() -> None:
        strategy.run(update)
        strategy.run(lambda: v.assign_add(1.0, read_value=False))

    for fn in (read, assign, add_in_another_step):
        with pytest.raises(ContextError, match="after its rows were changed"):
            coordinator.schedule(fn)

    def loop() -> None:
        jax.lax.fori_loop(0, 3, lambda i, c: (update(), c)[1], 0)

    coordinator.schedule(lambda: strategy.run(loop))
    with pytest.raises(ContextError, match="apply_gradients 3 times"):
        coordinator.join()
    assert float(v) == 1


def test_what_an_optimizer_cannot_take_is_a_named_error() -> None:
    strategy, other = make_strategy(), make_strategy()
    with strategy.scope():
        v, w = jaxdist.Variable(np.ones(3), name="v"), jaxdist.Variable(1.0)
    with other.scope():
        foreign = jaxdist.Variable(np.ones(3), name="v")
    tx = optax.sgd(1.0)
    with pytest.raises(ArgumentTypeError, match="was given tx=3"):
        ServerOptimizer(3, [v])  # type: ignore[arg-type]
    for bad in (v, 3, [], [v, 1], [jaxdist.Variable(1.0)]):
        with pytest.raises(ArgumentTypeError, match="on parameter servers"):
            ServerOptimizer(tx, bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="more than once"):
        ServerOptimizer(tx, [v, v])
    with pytest.raises(MixedStrategyError, match="several strategies"):
        ServerOptimizer(tx, [v, foreign])
    with pytest.raises(UnsupportedError, match="update of 'v' needs 'Variable', because of clip"):
        ServerOptimizer(optax.clip_by_global_norm(1.0), [v, w])
    optimizer = ServerOptimizer(tx, [v, w])
    grad = np.ones(3)
    for bad in (3, [1, 2], [(grad,)]):
        with pytest.raises(ArgumentTypeError, match="pairs of a gradient"):
            optimizer.apply_gradients(bad)  # type: ignore[arg-type]
    for pairs in ([(grad, foreign)], [(grad, 1)], [(grad, v), (grad, v)]):
        with pytest.raises(ArgumentError, match="was given a gradient of"):
            optimizer.apply_gradients(pairs)
    with pytest.raises(ShapeError, match=r"shape \[2\] for 'v', whose shape is \[3\]"):
        optimizer.apply_gradients([(np.ones(2), v)])
    with pytest.raises(UnsupportedError, match="IndexedSlices"):
        optimizer.apply_gradients([(IndexedSlices(np.ones((1, 1)), np.array([0])), v)])
    with pytest.raises(ReplicaValueError, match="one gradient"):
        optimizer.apply_gradients([(jaxdist.PerReplica([grad, grad]), v)])
    np.testing.assert_array_equal(v.numpy(), np.ones(3))


def test_state_that_no_update_needs_is_on_the_servers_too() -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        w = jaxdist.Variable(np.zeros(2, "float32"))
    optimizer = ServerOptimizer(training.moving_average(optax.sgd(1.0), 0.75), [w])

    def step() -> None:
        optimizer.apply_gradients([(-jnp.ones(2), w)])

    for _ in range(2):
        coordinator.schedule(step).fetch()
    [average] = optimizer.slots.values()
    # 0.75 * 0.25 + 0.25 * 2
    np.testing.assert_allclose(average.numpy(), [0.6875, 0.6875])
