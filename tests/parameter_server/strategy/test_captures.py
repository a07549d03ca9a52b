"""What a scheduled function may use besides its arguments, and what it may return."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ContextError, UnsupportedError
from tests.parameter_server.strategy.making import make_strategy

_X: Any = np.ones((1, 2), "float32")


def _make_model(value: float) -> Any:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.full((2, 1), value, "float32"))
    return model


class _Trainer:
    def __init__(self, model: Any) -> None:
        self.parts = {"model": [model]}

    def apply(self, x: Any) -> Any:
        return self.parts["model"][0](x)


def _close_over(model: Any, strategy: Any) -> dict[str, Any]:
    trainer = _Trainer(model)
    return {
        "closure": lambda x: model(x),
        "in a step": lambda x: strategy.run(lambda x: model(x), (x,)),
        "in jit": lambda x: jax.jit(lambda x: model(x))(x),
        "attribute": trainer.apply,
        "object": lambda x: trainer.apply(x),
        "function": jaxdist.function(lambda x: model(x)),
        "inner function": (lambda inner: lambda x: inner(x))(jaxdist.function(lambda x: model(x))),
        "partial": functools.partial(lambda model, x: model(x), model),
    }


@pytest.mark.parametrize("how", list(_close_over(None, None)))
def test_weights_of_a_captured_model_are_never_stale(how: str) -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    model = _make_model(1)
    fn = _close_over(model, strategy)[how]
    assert coordinator.schedule(fn, (_X,)).fetch() == 2

    def double(model: Any) -> None:
        model.kernel[...] = model.kernel[...] * 2

    coordinator.schedule(double, (model,))
    coordinator.join()
    assert coordinator.schedule(fn, (_X,)).fetch() == 4
    model.kernel.set_value(jnp.full((2, 1), 7, "float32"))
    assert coordinator.schedule(fn, (_X,)).fetch() == 14
    model.kernel[...] = jnp.full((2, 1), 8, "float32")
    assert coordinator.schedule(fn, (_X,)).fetch() == 16
    assert model(_X) == 16


def test_models_of_one_structure_do_not_share_weights() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    models = [_make_model(n) for n in range(1, 4)]

    def apply(model: Any, x: Any) -> Any:
        return model(x)

    for _ in range(2):
        found = [coordinator.schedule(apply, (m, _X)).fetch() for m in models]
        assert [float(np.squeeze(y)) for y in found] == [2, 4, 6]


def test_values_that_are_set_on_a_model_reach_the_servers() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _make_model(1)

    def apply(model: Any, x: Any) -> Any:
        return model(x)

    assert coordinator.schedule(apply, (model, _X)).fetch() == 2
    model.kernel.set_value(jnp.full((2, 1), 5, "float32"))
    assert coordinator.schedule(apply, (model, _X)).fetch() == 10
    nnx.update(model, nnx.state(_make_model(6)))
    assert coordinator.schedule(apply, (model, _X)).fetch() == 12
    with pytest.raises(ContextError, match="changed by index"):
        model.kernel[0] = 3.0


def test_a_captured_model_or_optimizer_is_not_changed() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    model = _make_model(1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train(x: Any) -> None:
        grads = nnx.grad(lambda m: m(x).sum())(model)
        optimizer.update(model, grads)

    def read_count() -> Any:
        return optimizer.step[...] + 1

    def change() -> None:
        model.kernel[...] = model.kernel[...] * 2

    for fn in (train, lambda x: strategy.run(train, (x,))):
        with pytest.raises(ContextError, match="closes over"):
            coordinator.schedule(fn, (_X,))
    with pytest.raises(ContextError, match=r"reads optimizer\.step of an optimizer"):
        coordinator.schedule(read_count)
    # Also when the servers have the model.
    coordinator.schedule(lambda model: model(_X), (model,)).fetch()
    with pytest.raises(ContextError, match="closes over its module"):
        coordinator.schedule(change)
    assert coordinator.statistics().scheduled == 1
    assert model(_X) == 2


def test_a_new_random_key_of_a_module_is_used() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def apply(drop: Any) -> Any:
        return drop(jnp.ones(1000))

    first = coordinator.schedule(apply, (drop,)).fetch()
    other = ClusterCoordinator(make_strategy())
    same = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(first, other.schedule(apply, (same,)).fetch())
    third = ClusterCoordinator(make_strategy())
    reseeded: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    third.schedule(apply, (reseeded,)).fetch()
    reseeded.rngs.key.set_value(jax.random.key(7))
    after = third.schedule(apply, (reseeded,)).fetch()
    second = coordinator.schedule(apply, (drop,)).fetch()
    assert not np.array_equal(after, second)


_VALUES: dict[str, tuple[Any, Any]] = {
    "int": (3, 5),
    "float": (0.5, 2.5),
    "bool": (False, True),
    "sign of zero": (0.0, -0.0),
    "number of NumPy": (np.float32(1), np.float32(4)),
    "text": ("left", "right"),
    "tuple": ((1, 2), (1, 3)),
    "number, then array": (3, jnp.asarray(7)),
    "array, then number": (jnp.asarray(7), 3),
    "random key": (jax.random.key(0), jax.random.key(1)),
}


def _read_value(value: Any) -> Any:
    if isinstance(value, str):
        return jnp.asarray({"left": 1.0, "right": 2.0}[value])
    if isinstance(value, tuple):
        return jnp.asarray(value).sum()
    if jax.dtypes.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key):
        return jax.random.normal(value)
    return jnp.arctan2(jnp.asarray(value, jnp.float32), -1.0)


@pytest.mark.parametrize("name", _VALUES)
def test_a_captured_value_that_is_no_array_is_the_one_of_now(name: str) -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    first, second = _VALUES[name]
    variable: Any = nnx.Variable(first)
    model = nnx.Dict(variable=variable)

    def read() -> Any:
        return _read_value(model.variable.get_value())

    ways: dict[str, Callable[[], Any]] = {
        "schedule": lambda: coordinator.schedule(read).fetch(),
        "arguments": lambda: coordinator.schedule(add, (np.float32(0),)).fetch(),
        "run": lambda: strategy.run(read),
        "run on a worker": lambda: coordinator.schedule(run).fetch(),
        "function": lambda: coordinator.schedule(call).fetch(),
    }

    def add(x: Any) -> Any:
        return read() + x

    def run() -> Any:
        return strategy.run(read)

    def call() -> Any:
        return jaxdist.function(read)()

    for value in (first, second, first):
        variable.set_value(value)
        found = {way: float(compute()) for way, compute in ways.items()}
        wanted = float(_read_value(value))
        assert found == pytest.approx(dict.fromkeys(ways, wanted), rel=1e-6)


def test_a_captured_number_may_decide_what_is_traced() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    depth: Any = nnx.Variable(2)
    traces = []

    def double(x: Any) -> Any:
        traces.append(depth.get_value())
        for _ in range(depth.get_value()):
            x = x * 2
        return x

    for value in (2, 2, 3, 3):
        depth.set_value(value)
        assert coordinator.schedule(double, (np.float32(1),)).fetch() == 2**value
    # Equal numbers are not traced again.
    assert traces == [2, 3]


def test_captured_arrays_are_constants_as_in_a_function() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    array = np.ones(2)

    def read() -> Any:
        return jnp.asarray(array).sum()

    compiled = jaxdist.function(read)
    assert coordinator.schedule(read).fetch() == compiled() == 2
    array[:] = 5
    assert coordinator.schedule(read).fetch() == compiled() == 2


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_arguments(impl: str) -> None:
    coordinator = ClusterCoordinator(make_strategy())

    def draw(key: Any) -> Any:
        return jax.random.normal(key, (3,))

    for seed in range(2):
        key = jax.random.key(seed, impl=impl)
        np.testing.assert_allclose(coordinator.schedule(draw, (key,)).fetch(), draw(key), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="returns a random key"):
        coordinator.schedule(lambda key: jax.random.split(key), (jax.random.key(0),))


def _call_back(x: Any) -> Any:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _print(x: Any) -> None:
    jax.debug.print("{}", x)


@pytest.mark.parametrize("fn", [_call_back, _print])
@pytest.mark.parametrize("inside", [False, True])
def test_python_that_runs_with_the_program_is_refused_with_its_line(fn: Any, inside: bool) -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)

    def step(x: Any) -> Any:
        return strategy.run(fn, (x,)) if inside else fn(x)

    with pytest.raises(UnsupportedError, match=r"step calls Python.*test_captures.py:\d+"):
        coordinator.schedule(step, (_X,))


def _to_float(x: Any) -> float:
    return float(x)


def _branch(x: Any) -> int:
    return 1 if x > 0 else 2


@pytest.mark.parametrize("fn", [_to_float, _branch])
def test_what_cannot_be_traced_is_the_error_of_jax_with_the_name_of_the_function(fn: Any) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        coordinator.schedule(fn, (np.float32(1),))
    assert any(fn.__name__ in note for note in caught.value.__notes__)
    coordinator.join()


def test_results_keep_their_structure() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    result = {"a": (1.5, [True, None]), "b": "text", "c": (), "d": np.arange(3)}

    def make() -> Any:
        return result

    found = coordinator.schedule(make).fetch()
    assert jax.tree.structure(found) == jax.tree.structure(result)
    np.testing.assert_array_equal(found["d"], [0, 1, 2])
    assert (found["a"][0], found["a"][1][0], found["b"]) == (1.5, True, "text")
    assert coordinator.schedule(lambda: None).fetch() is None
    low = coordinator.schedule(lambda: jnp.ones(2, jnp.bfloat16)).fetch()
    assert low.dtype == jnp.bfloat16
