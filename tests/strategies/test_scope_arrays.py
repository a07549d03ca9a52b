"""What is made in a scope is copied to the devices once; steps after the first copy nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica

_MADE: dict[str, Callable[[], Any]] = {
    "many": jaxdist.MirroredStrategy,
    "another device": lambda: jaxdist.OneDeviceStrategy("cpu:3"),
    "other devices": lambda: jaxdist.MirroredStrategy(["cpu:2", "cpu:3"]),
    "virtual": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4),
}


@pytest.fixture(params=_MADE)
def strategy(request: pytest.FixtureRequest) -> Any:
    """A strategy of each kind."""
    return _MADE[request.param]()


def _batch(strategy: Any) -> Any:
    rows = np.ones((8, 4), np.float32)
    return jax.device_put(rows, strategy.per_replica_sharding)


def _frozen(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        params = {"w": jnp.ones((4, 4)), "b": jax.random.normal(jax.random.key(0), (4,))}
    x = _batch(strategy)
    step = lambda p, x: x @ p["w"] + p["b"][None]  # noqa: E731
    return lambda: strategy.run(step, (params, x))


def _trained(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        held = [{"w": jnp.ones((4, 4))}]
    x = _batch(strategy)

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        grads = jaxdist.get_replica_context().all_reduce("mean", grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def call() -> None:
        held[0] = strategy.run(step, (held[0], x))

    return call


def _module(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = _batch(strategy)

    def step(model: Any, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, jaxdist.get_replica_context().all_reduce("mean", grads))

    return lambda: strategy.run(step, (model, optimizer, x))


def _read_module(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    x = _batch(strategy)
    step = lambda model, x: model(x)  # noqa: E731
    return lambda: strategy.run(step, (model, x))


def _variable(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        v = jaxdist.Variable(jnp.ones((4, 4)))
    x = _batch(strategy)
    step = lambda x: x @ v.read_value()  # noqa: E731
    return lambda: strategy.run(step, (x,))


def _values(strategy: Any) -> Callable[[], Any]:
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full((2, 4), ctx.replica_id_in_sync_group, np.float32)
    )
    step = lambda x: x * 2  # noqa: E731
    return lambda: strategy.run(step, (value,))


@pytest.mark.parametrize(
    "make", [_frozen, _trained, _module, _read_module, _variable, _values], ids=lambda f: f.__name__
)
def test_steps_after_the_first_copy_nothing(make: Any, strategy: Any) -> None:
    call = make(strategy)
    for _ in range(3):
        call()
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            call()


def test_a_copy_is_kept_only_for_the_array_that_it_is_of() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    step = lambda w, x: x * w  # noqa: E731
    x = _batch(strategy)
    mirrored = jax.device_put(np.float32(7.0), strategy.replicated_sharding)
    ws = [jnp.float32(i) for i in range(4)]
    for w in [*ws, mirrored, *ws, *ws[::-1], mirrored, ws[1], ws[1]]:
        result = strategy.run(step, (w, x))
        assert (np.asarray(result.array) == float(w)).all()


def test_an_array_that_was_donated_by_another_step_is_copied_again() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    read = lambda w, x: x * w  # noqa: E731
    give = lambda w: w + 1  # noqa: E731
    w, x = jnp.full((4,), 2.0), _batch(strategy)
    for _ in range(3):
        assert (np.asarray(strategy.run(read, (w[None], x)).array) == 2).all()
    given = strategy.run(give, (w,), options=jaxdist.RunOptions(donate_argnums=(0,)))
    assert given.tolist() == [3.0] * 4


def test_values_from_a_function_are_one_array_on_the_devices(strategy: Any) -> None:
    count = strategy.num_replicas_in_sync
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full((2, 3), ctx.replica_id_in_sync_group, np.float32)
    )
    if count == 1:
        assert value.sharding.device_set == strategy.layout.device_set
        return
    assert isinstance(value, PerReplica)
    assert value.is_global
    assert value.array.sharding.is_equivalent_to(strategy.per_replica_sharding, 2)
    for r, local in enumerate(value.values):
        assert (np.asarray(local) == r).all()


@pytest.mark.parametrize(
    "values", [[1, 2], ["a", "b"], [None, None], [np.ones(1), np.ones(2)], [np.ones(1), 2.0]]
)
def test_what_is_no_one_array_is_held_as_it_is(values: list[Any]) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    made = strategy.experimental_distribute_values_from_function(
        lambda ctx: values[ctx.replica_id_in_sync_group]
    )
    assert not made.is_global
    assert [np.shape(v) for v in made.values] == [np.shape(v) for v in values]
