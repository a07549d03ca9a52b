"""Copies of models and variables: on servers they are what they are for a `MirroredStrategy`."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import MirroredStrategy, Variable
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import UnsupportedError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_strategy

_X = np.ones((1, 2), np.float32)


class _Net(nnx.Module):
    def __init__(self, value: float) -> None:
        self.kernel = nnx.Param(jnp.full((2, 1), value, "float32"))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return (x @ self.kernel).sum()


def _train(model: Any, optimizer: Any) -> None:
    grads = nnx.grad(lambda model: model(_X))(model)
    optimizer.update(model, grads)
    model.seen[...] = model.seen[...] + 1


def _with(model: Any, change: Callable[[Any], object]) -> Any:
    """Return another model, after a change that takes something over from the first one."""
    other = _Net(9)
    # The part that is not taken over.
    nnx.update(other, jax.tree.map(jnp.array, nnx.state(model)))
    change(other)
    return other


def _replace_pure(other: Any, model: Any) -> None:
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(model)))
    nnx.update(other, state)


def _merge(model: Any, change: Callable[[Any], Any], **options: Any) -> Any:
    graph, state = nnx.split(model)
    return nnx.merge(graph, change(state), **options)


def _same(x: Any) -> Any:
    return x


# What takes a model, and returns another one or the same.
_COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": nnx.clone,
    "clone that shares variables": lambda m: nnx.clone(m, variables=False),
    "clone with arrays": lambda m: nnx.clone(m, arrays=True),
    "clone as a tree": lambda m: nnx.clone(m, graph=False),
    "split and merge": lambda m: _merge(m, _same),
    "split and merge with copies": lambda m: _merge(m, _same, copy=True),
    "merge of a mapped state": lambda m: _merge(m, lambda s: jax.tree.map(_same, s)),
    "merge of a copied state": lambda m: _merge(m, copy.deepcopy),
    "merge of a flat state": lambda m: _merge(
        m, lambda s: nnx.from_flat_state(nnx.to_flat_state(s))
    ),
    "merge of values": lambda m: _merge(m, nnx.as_pure),
    "merge of leaves": lambda m: _merge(
        m, lambda s: jax.tree.unflatten(jax.tree.structure(s), jax.tree.leaves(s))
    ),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "jax.tree.map": lambda m: jax.tree.map(_same, m),
    "jax.jit": lambda m: jax.jit(_same)(m),
    "nnx.jit": lambda m: nnx.jit(nnx.clone)(m),
    "update by a state": lambda m: _with(m, lambda o: nnx.update(o, nnx.state(m))),
    "update by a mapped state": lambda m: _with(
        m, lambda o: nnx.update(o, jax.tree.map(_same, nnx.state(m)))
    ),
    "update by values": lambda m: _with(m, lambda o: _replace_pure(o, m)),
    "copy_from": lambda m: _with(m, lambda o: o.kernel.copy_from(m.kernel)),
    "set_value": lambda m: _with(m, lambda o: o.kernel.set_value(m.kernel.get_value())),
    "set_raw_value": lambda m: _with(m, lambda o: o.kernel.set_raw_value(m.kernel.get_raw_value())),
    "assignment": lambda m: _with(m, lambda o: o.kernel.__setitem__(..., m.kernel[...])),
    "a variable of the array": lambda m: _with(
        m, lambda o: setattr(o, "kernel", nnx.Param(m.kernel[...]))
    ),
    "a variable of the value": lambda m: _with(
        m, lambda o: setattr(o, "kernel", nnx.Param(m.kernel.get_value()))
    ),
    "copy of a variable": lambda m: _with(m, lambda o: setattr(o, "kernel", m.kernel.copy())),
    "copy.copy of a variable": lambda m: _with(
        m, lambda o: setattr(o, "kernel", copy.copy(m.kernel))
    ),
    "pickle of a variable": lambda m: _with(
        m, lambda o: setattr(o, "kernel", pickle.loads(pickle.dumps(m.kernel)))
    ),
    "the variable itself": lambda m: _with(m, lambda o: setattr(o, "kernel", m.kernel)),
    "an average": lambda m: nnx.EMA(m, decay=0.5).apply_to(m),
}


def _run_mirrored() -> Callable[..., None]:
    strategy = MirroredStrategy(["cpu:0"])

    def train(model: Any, optimizer: Any) -> None:
        strategy.run(_train, (model, optimizer))

    return train


def _run_on_servers() -> Callable[..., None]:
    coordinator = ClusterCoordinator(make_strategy())

    def train(model: Any, optimizer: Any) -> None:
        coordinator.schedule(_train, (model, optimizer)).fetch()

    return train


def _follow(make_copy: Callable[[Any], Any], train: Callable[..., None]) -> list[Any]:
    """Return the values of a model and of its copy as both of them are trained."""
    model = _Net(1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)
    values = []

    def note(*models: Any) -> None:
        values.append([float(x) for m in models for x in (m(_X), m.seen[...])])

    train(model, optimizer)
    made = make_copy(model)
    note(model, made)
    train(model, optimizer)
    note(model, made)
    train(made, nnx.Optimizer(made, optax.sgd(0.5), wrt=nnx.Param))
    note(model, made)
    train(model, optimizer)
    note(model, made)
    return values


@pytest.mark.parametrize("name", _COPIES)
def test_a_copy_of_a_model_is_trained_as_that_of_a_mirrored_strategy(name: str) -> None:
    wanted = _follow(_COPIES[name], _run_mirrored())
    np.testing.assert_allclose(_follow(_COPIES[name], _run_on_servers()), wanted, rtol=1e-6)


def test_a_clone_has_variables_of_its_own_on_the_servers() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model = _Net(1)

    def double(model: Any) -> None:
        model.kernel[...] = model.kernel[...] * 2

    coordinator.schedule(double, (model,)).fetch()
    made = nnx.clone(model)
    coordinator.schedule(double, (made,)).fetch()
    names = [m.kernel.remote_name for m in (model, made)]
    assert names == ["model.kernel", "model.kernel_1"]
    assert (float(model(_X)), float(made(_X))) == (4, 8)
    assert nnx.clone(model).kernel.device == jax.devices()[0]


def test_a_clone_of_an_optimizer_has_a_state_of_its_own() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    mirrored = MirroredStrategy(["cpu:0"])
    found = []
    for is_on_servers in (True, False):
        model = _Net(1)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        pairs = [(model, optimizer)]
        for step in range(4):
            for pair in pairs:
                if is_on_servers:
                    coordinator.schedule(_train, pair).fetch()
                else:
                    mirrored.run(_train, pair)
            if step == 1:
                pairs.append(nnx.clone((model, optimizer)))
                # From here on the two get different numbers of steps.
                pairs.append(pairs[1])
        found.append(
            [(float(m(_X)), int(o.step[...]), int(o.opt_state[0].count[...])) for m, o in pairs]
        )
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert [row[1] for row in found[0]] == [4, 6, 6]


def test_a_saved_state_restores_a_model_after_more_training() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    savers: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
        "mapped state": (lambda m: jax.tree.map(_same, nnx.state(m)), nnx.update),
        "values": (lambda m: nnx.as_pure(nnx.state(m)), nnx.update),
        "pure dict": (lambda m: nnx.to_pure_dict(nnx.state(m)), nnx.update),
        "leaves": (
            lambda m: jax.tree.leaves(nnx.state(m)),
            lambda m, saved: nnx.update(
                m, jax.tree.unflatten(jax.tree.structure(nnx.state(m)), saved)
            ),
        ),
        "one value": (
            lambda m: m.kernel.get_value(),
            lambda m, saved: m.kernel.set_value(saved),
        ),
        "one array": (
            lambda m: m.kernel[...],
            lambda m, saved: m.kernel.__setitem__(..., saved),
        ),
    }

    def double(model: Any) -> Any:
        model.kernel[...] = model.kernel[...] * 2

    for save, restore in savers.values():
        model = _Net(1)
        coordinator.schedule(double, (model,)).fetch()
        saved = save(model)
        coordinator.schedule(double, (model,)).fetch()
        assert model(_X) == 8
        restore(model, saved)
        assert model(_X) == 4
        assert coordinator.schedule(lambda m: m(_X), (model,)).fetch() == 4


_MAKE: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: MirroredStrategy(["cpu:0"]),
    "server": make_strategy,
    "sharded": lambda: make_strategy(variable_partitioner=FixedShardsPartitioner(2)),
}
_OF_VARIABLES: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "deepcopy of a list": lambda v: copy.deepcopy([v, v])[1],
    "jax.tree.map": lambda v: jax.tree.map(_same, {"v": v})["v"],
    "jax.jit": lambda v: jax.jit(_same)(v),
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "numpy": lambda v: v.numpy(),
}


@pytest.mark.parametrize(("kind", "name"), [*itertools.product(_MAKE, _OF_VARIABLES)])
def test_a_copy_of_a_variable_does_not_follow_it(kind: str, name: str) -> None:
    with _MAKE[kind]().scope():
        variable: Any = Variable(np.ones((4, 2), np.float32), name="v", trainable=False)
    made = _OF_VARIABLES[name](variable)
    variable.assign(np.full((4, 2), 5, np.float32))
    np.testing.assert_array_equal(np.asarray(made), np.ones((4, 2)))
    is_variable = name.startswith(("copy", "deepcopy"))
    assert is_variable == (type(made) is type(variable))
    if is_variable:
        made.assign_add(np.ones((4, 2), np.float32))
        np.testing.assert_array_equal(made.numpy(), np.full((4, 2), 2))
        assert not made.trainable
        assert made.name == variable.name
    np.testing.assert_array_equal(variable.numpy(), np.full((4, 2), 5))


def test_a_list_that_is_copied_has_one_copy_of_each_variable() -> None:
    for make in _MAKE.values():
        with make().scope():
            variable: Any = Variable(np.ones((4, 2), np.float32))
        first, second = copy.deepcopy([variable, variable])
        assert first is second


@pytest.mark.parametrize("kind", ["server", "sharded"])
def test_a_variable_on_a_server_is_not_pickled(kind: str) -> None:
    with _MAKE[kind]().scope():
        variable = Variable(np.ones((4, 2), np.float32), name="v")
    with pytest.raises(UnsupportedError, match=r"Variable 'v.*' of a parameter server was pickled"):
        pickle.dumps({"v": variable})


def test_variables_of_a_strategy_are_pytrees_of_their_values() -> None:
    for make in _MAKE.values():
        with make().scope():
            variable: Any = Variable(np.arange(8, dtype=np.float32).reshape(4, 2))

        def add_up(x: Any) -> Any:
            return (jnp.asarray(x) ** 2).sum()

        assert jax.jit(add_up)(variable) == 140
        np.testing.assert_array_equal(jax.grad(add_up)(variable), 2 * variable.numpy())
        assert jax.jit(lambda tree: add_up(tree["v"]))({"v": variable}) == 140
        assert jaxdist.function(add_up)(variable) == 140
