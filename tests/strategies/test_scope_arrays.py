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


def _made(strategy: Any) -> tuple[Any, Any]:
    """A frozen array as a scope makes it, and a batch."""
    with strategy.scope():
        frozen = {"w": jnp.ones((4, 4))}
    return frozen, _batch(strategy)


def _donating(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    state = [jax.device_put(np.float32(0), strategy.replicated_sharding)]
    options = jaxdist.RunOptions(donate_argnums=(0,))

    def step(total: Any, frozen: Any, x: Any) -> Any:
        return total + jaxdist.get_replica_context().all_reduce("sum", (x @ frozen["w"]).sum())

    def call() -> None:
        state[0] = strategy.run(step, (state[0], frozen, x), options=options)

    return call


def _static(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    step = lambda frozen, x, train: x @ frozen["w"] if train else x  # noqa: E731
    return lambda: strategy.run(step, (frozen, x, True))


def _static_by_name(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    options = jaxdist.RunOptions(static_argnames=("n",))
    step = lambda frozen, x, n: x[:n] @ frozen["w"]  # noqa: E731
    return lambda: strategy.run(step, (frozen, x), {"n": 1}, options=options)


def _module_beside(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = lambda model, frozen, x: model(x @ frozen["w"])  # noqa: E731
    strategy.run(step, (model, {"w": frozen["w"] + 1}, x))  # its own arrays are copied by this one
    return lambda: strategy.run(step, (model, frozen, x))


def _module_nested(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    models = {"one": nnx.Linear(4, 4, rngs=nnx.Rngs(0))}
    step = lambda models, frozen, x: models["one"](x @ frozen["w"])  # noqa: E731
    strategy.run(step, (models, {"w": frozen["w"] + 1}, x))
    return lambda: strategy.run(step, (models, frozen, x))


def _variable_beside(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    with strategy.scope():
        v = jaxdist.Variable(np.float32(0), aggregation=jaxdist.VariableAggregation.SUM)

    def step(frozen: Any, x: Any) -> Any:
        v.assign_add((x @ frozen["w"]).sum())

    return lambda: strategy.run(step, (frozen, x))


def _variable_and_nested_text(strategy: Any) -> Callable[[], Any]:
    frozen, x = _made(strategy)
    with strategy.scope():
        v = jaxdist.Variable(np.float32(1))
    step = lambda d, x: x @ d["w"] * v  # noqa: E731
    return lambda: strategy.run(step, ({**frozen, "mode": "train"}, x))


@pytest.mark.parametrize(
    "make",
    [
        _frozen,
        _donating,
        _static,
        _static_by_name,
        _module_beside,
        _module_nested,
        _variable_beside,
        _variable_and_nested_text,
    ],
    ids=lambda f: f.__name__,
)
def test_the_second_step_copies_nothing(make: Any, strategy: Any) -> None:
    call = make(strategy)
    call()
    with jax.transfer_guard("disallow"):
        for _ in range(4):
            call()


_BESIDE: dict[str, Callable[[], Any]] = {
    "an array on one device": lambda: jnp.ones(4),
    "a NumPy array": lambda: np.ones(4, np.float32),
    "a scalar of NumPy": lambda: np.float32(1),
    "values of replicas": lambda: PerReplica([np.ones(4, np.float32)] * 2),
}


@pytest.mark.parametrize("nests", [True, False], ids=["nested", "by itself"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "no static"])
@pytest.mark.parametrize("beside", _BESIDE)
def test_an_object_beside_arrays_is_updated_at_each_step(
    beside: str, static: bool, nests: bool
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    model: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    given = {"model": model} if nests else model

    def step(given: Any, x: Any, *_: Any) -> None:
        bias = (given["model"] if nests else given).bias
        bias[...] = bias[...] + jaxdist.get_replica_context().all_reduce("mean", x)

    x = _BESIDE[beside]()
    for number in range(1, 6):
        strategy.run(step, (given, x, "text") if static else (given, x))
        assert model.bias[...].tolist() == [number] * 4


def test_what_is_donated_is_no_kept_copy() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    both = lambda w, x: (w + x, x)  # noqa: E731
    options = jaxdist.RunOptions(donate_argnums=(0,))
    x = jnp.full((4,), 3.0)
    for number in range(4):
        w = jnp.full((4,), float(number))
        result, same = strategy.run(both, (w, x), options=options)
        assert (result.tolist(), same.tolist()) == ([number + 3.0] * 4, [3.0] * 4)
        assert not x.is_deleted()
        with pytest.raises(jaxdist.errors.DonationError):
            strategy.run(both, (x, x), options=options)
        assert x.tolist() == [3.0] * 4


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
