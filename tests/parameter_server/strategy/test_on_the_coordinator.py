"""Functions of JAX, Flax and jaxdist that the coordinator calls on a model that is on servers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import MirroredStrategy
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ContextError
from tests.parameter_server.strategy.making import make_strategy

_X = np.ones((1, 2), np.float32)


class _Net(nnx.Module):
    def __init__(self, value: float) -> None:
        self.kernel = nnx.Param(jnp.full((2, 1), value, "float32"))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return (x @ self.kernel).sum()


def _apply(model: Any) -> Any:
    return model(_X) ** 2


def _count(model: Any) -> Any:
    model.seen[...] = model.seen[...] + 1
    return _apply(model)


def _double(model: Any) -> None:
    model.kernel[...] = model.kernel[...] * 2


def _train(model: Any, optimizer: Any) -> None:
    optimizer.update(model, nnx.grad(_apply)(model))


def _scan(model: Any) -> Any:
    shared = nnx.StateAxes({...: None})
    return nnx.scan(lambda m, x: m(x), in_axes=(shared, 0), out_axes=0)(model, _X[None])


def _make_caller(make: Callable[[], Any], **options: Any) -> Callable[[Any], Any]:
    """Return a function that makes a compiled function once, and calls it whenever it is called."""
    made: list[Any] = []

    def call(model: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](model, **options)

    return call


def _run_mirrored() -> Callable[[Any], Any]:
    strategy = MirroredStrategy(["cpu:0"])
    return lambda model: strategy.run(_apply, (model,))


# What reads a model. Each is called again after the values on the servers have changed.
_READ: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "call": lambda: _apply,
    "jax.jit": lambda: _make_caller(lambda: jax.jit(_apply)),
    "jax.jit of a state": lambda: (
        lambda m: jax.jit(lambda graph, state: _apply(nnx.merge(graph, state)), static_argnums=0)(
            *nnx.split(m)
        )
    ),
    "jax.grad": lambda: lambda m: jax.grad(_apply)(m).kernel[...],
    "jax.value_and_grad": lambda: lambda m: jax.value_and_grad(_apply)(m)[0],
    "jax.vmap": lambda: lambda m: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, _X[None]),
    "jax.checkpoint": lambda: jax.checkpoint(_apply),
    "nnx.jit": lambda: _make_caller(lambda: nnx.jit(_apply)),
    "nnx.jit as a tree": lambda: _make_caller(lambda: nnx.jit(_apply, graph=False)),
    "nnx.jit without updates": lambda: _make_caller(lambda: nnx.jit(_apply, graph_updates=False)),
    "nnx.cached_partial": lambda: lambda m: nnx.cached_partial(nnx.jit(_apply), m)(),
    "nnx.grad": lambda: lambda m: nnx.grad(_apply)(m).kernel[...],
    "nnx.grad as a tree": lambda: lambda m: nnx.grad(_apply, graph=False)(m).kernel[...],
    "nnx.value_and_grad": lambda: lambda m: nnx.value_and_grad(_apply)(m)[0],
    "nnx.jit of nnx.grad": lambda: _make_caller(
        lambda: nnx.jit(lambda m: nnx.grad(_apply)(m).kernel[...])
    ),
    "nnx.vmap": lambda: lambda m: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, _X[None]),
    "nnx.scan": lambda: _scan,
    "nnx.remat": lambda: nnx.remat(_apply),
    "nnx.cond": lambda: lambda m: nnx.cond(jnp.asarray(True), _apply, lambda m: -_apply(m), m),
    "jaxdist.function": lambda: _make_caller(lambda: jaxdist.function(_apply)),
    "another strategy": _run_mirrored,
    "a step by hand": lambda: (
        lambda m: jax.tree.map(
            lambda p, g: p - g, nnx.state(m, nnx.Param), nnx.grad(_apply)(m)
        ).kernel[...]
    ),
}


@pytest.mark.parametrize("name", _READ)
def test_what_reads_a_model_gets_the_values_of_the_servers(name: str) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model, read = _Net(1), _READ[name]()
    coordinator.schedule(_double, (model,)).fetch()
    np.testing.assert_allclose(read(model), _READ[name]()(_Net(2)))
    # What comes back is not written: it would hide the changes of workers, or undo them.
    coordinator.schedule(lambda: _apply(model)).fetch()
    coordinator.schedule(_double, (model,)).fetch()
    np.testing.assert_allclose(model.kernel[...], np.full((2, 1), 4))
    np.testing.assert_allclose(read(model), _READ[name]()(_Net(4)))
    coordinator.schedule(_double, (model,)).fetch()
    assert model(_X) == 16


# What would write back.
_CHANGE: dict[str, Callable[[Any], Any]] = {
    "nnx.jit": lambda m: nnx.jit(_count)(m),
    "nnx.jit of a training step": lambda m: nnx.jit(_train)(
        m, nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
    ),
    "nnx.jit with donation": lambda m: nnx.jit(_apply, donate_argnums=0)(m),
    "nnx.grad": lambda m: nnx.grad(_count)(m),
    "nnx.cond": lambda m: nnx.cond(jnp.asarray(True), _count, _apply, m),
    "jaxdist.function": lambda m: jaxdist.function(_count)(m),
    "another strategy": lambda m: MirroredStrategy(["cpu:0"]).run(_count, (m,)),
}


@pytest.mark.parametrize("name", _CHANGE)
def test_what_changes_a_model_says_to_run_it_on_workers(name: str) -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    model = _Net(1)
    coordinator.schedule(_double, (model,)).fetch()
    with pytest.raises(ContextError, match=r"(?s)changed or donated in .*strategy\.run\(step"):
        _CHANGE[name](model)
    # The model is as it was, and on the servers.
    assert (model(_X), model.seen[...]) == (4, 0)
    assert model.kernel.remote_name == "model.kernel"
    # The remedies.
    strategy.run(_count, (model,))
    coordinator.schedule(nnx.jit(_count), (model,)).fetch()
    assert model.seen[...] == 2
    copied = nnx.clone(model)
    _CHANGE[name](copied)
    assert (model(_X), model.seen[...]) == (4, 2)


def test_other_objects_of_a_transformation_change() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _Net(1)
    coordinator.schedule(_double, (model,)).fetch()
    average = nnx.metrics.Average()

    @nnx.jit
    def evaluate(model: Any, average: Any) -> None:
        average.update(values=model(_X))

    evaluate(model, average)
    coordinator.schedule(_double, (model,)).fetch()
    evaluate(model, average)
    assert average.compute() == (4 + 8) / 2


def test_a_model_in_a_closure_is_no_constant_of_a_compiled_function() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _Net(1)
    coordinator.schedule(_double, (model,)).fetch()
    for jit in (jax.jit, nnx.jit):
        with pytest.raises(ContextError, match="would keep the value"):
            jit(lambda: model(_X))()
    compiled = jaxdist.function(lambda: model(_X))
    assert compiled() == 4
    coordinator.schedule(_double, (model,)).fetch()
    assert compiled() == 8
    gradient = jax.grad(lambda x: model(x))(_X)
    np.testing.assert_array_equal(gradient, [[4, 4]])


def test_transformations_in_scheduled_functions_use_the_models_of_the_servers() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _Net(1)
    coordinator.schedule(_double, (model,)).fetch()
    steps: dict[str, Callable[[], Any]] = {
        "grad": lambda: jax.grad(_apply)(model).kernel[...],
        "clone": lambda: _apply(nnx.clone(model)),
        "merge": lambda: _apply(nnx.merge(*nnx.split(model))),
        "jit": lambda: jax.jit(lambda state: state["kernel"][...].sum())(nnx.state(model)),
    }
    found = {name: coordinator.schedule(step).fetch() for name, step in steps.items()}
    assert (found["clone"], found["merge"], found["jit"]) == (16, 16, 4)
    np.testing.assert_array_equal(found["grad"], [[8], [8]])
    coordinator.schedule(_double, (model,)).fetch()
    assert coordinator.schedule(steps["clone"]).fetch() == 64


def test_only_what_looks_at_a_value_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    strategy = make_strategy()
    read = strategy.storage.read

    def count(name: str) -> Any:
        reads[name] += 1
        return read(name)

    monkeypatch.setattr(strategy.storage, "read", count)
    coordinator = ClusterCoordinator(strategy)
    model = _Net(1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        coordinator.schedule(_train, (model, optimizer)).fetch()
        coordinator.schedule(lambda: model(_X)).fetch()
        strategy.run(_train, (model, optimizer))
    # A step that runs here reads by its program.
    assert not reads
    model(_X)
    assert reads == {"model.kernel": 1}
    apply = jax.jit(_apply)
    apply(model)
    reads.clear()
    apply(model)
    assert reads == {"model.kernel": 1, "model.seen": 1}


def test_attributes_of_a_variable_are_those_of_its_array_and_of_the_server() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _Net(1)
    coordinator.schedule(_double, (model,)).fetch()
    assert model.kernel.device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert (model.kernel.dtype, model.kernel.size) == (np.float32, 2)
    assert (model.kernel.T.shape, model.kernel.sum()) == ((1, 2), 4)
    assert isinstance(model.kernel.get_value(), jax.Array)
    with pytest.raises(AttributeError, match="'Param' object has no attribute 'unknown'"):
        _ = model.kernel.unknown
    model.kernel.assign_add(np.ones((2, 1), np.float32))
    assert model(_X) == 6
    with pytest.raises(ContextError, match="changed by index"):
        model.kernel[0] = 3.0
