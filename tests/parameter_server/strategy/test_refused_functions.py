"""Functions that are refused when they are scheduled: nothing runs, and nothing changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import IndexedSlices
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import (
    ContextError,
    JaxdistError,
    MixedStrategyError,
    ShapeError,
    UnsupportedError,
)
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

_X: Any = np.ones((1, 2), "float32")


def _make_line(seed: int = 0) -> Any:
    return nnx.Linear(2, 1, rngs=nnx.Rngs(seed))


def _find_grads(model: Any) -> Any:
    return nnx.grad(lambda model: model(_X).sum())(model)


# Optimizers


def _init(model: Any, optimizer: Any) -> Any:
    return optimizer.tx.init(nnx.state(model, nnx.Param))


def _update_without_parameters(model: Any, optimizer: Any) -> Any:
    return optimizer.tx.update(_find_grads(model), optimizer.opt_state)


def _update_with_a_loss(model: Any, optimizer: Any) -> None:
    optimizer.update(model, _find_grads(model), value=3.0)


def _update_a_part(model: Any, optimizer: Any) -> None:
    grads = _find_grads(model)
    del grads["bias"]
    optimizer.update(model, grads)


def _update_another_model(model: Any, optimizer: Any) -> None:
    other = _make_line(1)
    optimizer.update(other, _find_grads(other))


def _read_state(model: Any, optimizer: Any) -> Any:
    return optimizer.opt_state[0].mu["kernel"][...].sum()


def _change_state(model: Any, optimizer: Any) -> None:
    optimizer.opt_state[0].mu["kernel"][...] = jnp.zeros((2, 1))


_OPTIMIZERS: dict[Callable[..., Any], tuple[type[JaxdistError], tuple[str, ...]]] = {
    _init: (
        UnsupportedError,
        ("optimizer.tx.init was called in a function", "Make the optimizer before"),
    ),
    _update_without_parameters: (
        UnsupportedError,
        ("optimizer.tx.update was given no params", "Call optimizer.update(model, grads)"),
    ),
    _update_with_a_loss: (
        UnsupportedError,
        ("given the arguments ['value']", "from gradients and their own values only"),
    ),
    _update_a_part: (
        ShapeError,
        ("given 1 gradients for 2 parameters", "Take the gradients of the same model"),
    ),
    _update_another_model: (
        ContextError,
        ("_update_another_model calls optimizer.update", "['bias']", "args=(model, optimizer)"),
    ),
    _read_state: (
        UnsupportedError,
        ("_read_state reads or changes optimizer.opt_state[0].mu.kernel", "optimizer.update("),
    ),
    _change_state: (
        UnsupportedError,
        ("_change_state reads or changes optimizer.opt_state[0].mu.kernel", "optimizer.update("),
    ),
}


@pytest.mark.parametrize("fn", _OPTIMIZERS)
def test_what_an_optimizer_on_the_servers_cannot_do_is_refused(fn: Callable[..., Any]) -> None:
    error, parts = _OPTIMIZERS[fn]
    coordinator = ClusterCoordinator(make_strategy())
    model = _make_line()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with refused(error, *parts):
        coordinator.schedule(fn, (model, optimizer))
    coordinator.join()
    assert coordinator.statistics().scheduled == 0
    np.testing.assert_array_equal(model.kernel[...], _make_line().kernel[...])


# Values that are not one array


class _Holder(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.value = nnx.Param(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((np.ones(2), np.ones(3)), "tuple"),
        ({"a": np.ones(2)}, "dict"),
        ("text", "str"),
    ],
)
def test_a_variable_that_holds_no_array_is_refused(value: Any, kind: str) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    with refused(UnsupportedError, f"holder.value holds a {kind}", "an nnx.Variable of its own"):
        coordinator.schedule(lambda holder: 1, (_Holder(value),))


def test_arrays_of_a_captured_variable_are_refused_instead_of_kept_as_they_were() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    holder = _Holder({"a": jnp.ones(2), "b": jnp.ones(3)})
    with refused(UnsupportedError, "holder.value holds a dict", "an nnx.Variable of its own"):
        coordinator.schedule(lambda: holder.value.get_value()["a"].sum())


@pytest.mark.parametrize("value", [2, 2.0, True, 2j, np.float32(2)])
def test_a_number_is_an_array_without_dims_as_in_other_strategies(value: Any) -> None:
    def double(holder: Any) -> Any:
        return jnp.asarray(holder.value.get_value()) * 2

    coordinator = ClusterCoordinator(make_strategy())
    found = coordinator.schedule(double, (_Holder(value),)).fetch()
    wanted = jaxdist.MirroredStrategy(["cpu:0"]).run(double, (_Holder(value),))
    assert (found, found.dtype) == (wanted, wanted.dtype)


# Variables of another strategy


def _make_two() -> tuple[Any, Any, Any, Any]:
    """Return two strategies, and a variable of each, with the same name."""
    made = []
    for start in (1.0, 10.0):
        strategy = make_strategy()
        with strategy.scope():
            made.append((strategy, jaxdist.Variable(np.full((4, 2), start), name="table")))
    (one, of_one), (other, of_other) = made
    return one, of_one, other, of_other


_ROW = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))
_USES: dict[str, Callable[[Any], Any]] = {
    "value": lambda v: v.value(),
    "rows": lambda v: v.sparse_read(np.array([0])),
    "assign": lambda v: v.assign(np.zeros((4, 2))),
    "assign_add": lambda v: v.assign_add(np.ones((4, 2)), read_value=False),
    "scatter_add": lambda v: v.scatter_add(_ROW),
    "scatter_max": lambda v: v.scatter_max(_ROW),
}


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("how", ["schedule", "step", "run"])
def test_a_variable_of_another_strategy_is_not_taken_for_the_own_one_of_its_name(
    use: str, how: str
) -> None:
    _, of_one, other, of_other = _make_two()
    coordinator = ClusterCoordinator(other)

    def change() -> None:
        _USES[use](of_one)

    def call() -> None:
        other.run(change) if how == "step" else change()

    with refused(
        MixedStrategyError,
        "call uses Variable 'table', which is on the parameter servers of another strategy",
        "make the variable inside `with strategy.scope():` of this one",
    ):
        if how == "run":
            other.run(call)
        else:
            coordinator.schedule(call)
            coordinator.join()
    assert (of_one.numpy() == 1).all()
    assert (of_other.numpy() == 10).all()


def test_a_model_of_another_strategy_is_refused_until_it_has_arrays() -> None:
    def double(model: Any) -> None:
        model.kernel[...] = model.kernel[...] * 2

    one, other = (ClusterCoordinator(make_strategy()) for _ in range(2))
    model, of_other = _make_line(0), _make_line(1)
    one.schedule(double, (model,))
    one.join()
    # Its variables have the same names.
    other.schedule(double, (of_other,))
    other.join()
    with refused(MixedStrategyError, "uses model.bias, which is on", "To take a model over"):
        other.schedule(double, (model,))
    with refused(MixedStrategyError, "'model.kernel'", "To take a model over"):
        other.schedule(lambda: model.kernel[...].sum())
    np.testing.assert_array_equal(of_other.kernel[...], 2 * _make_line(1).kernel[...])

    nnx.update(model, jax.tree.map(jnp.asarray, nnx.state(model)))
    other.schedule(double, (model,))
    other.join()
    np.testing.assert_array_equal(model.kernel[...], 4 * _make_line(0).kernel[...])
    np.testing.assert_array_equal(of_other.kernel[...], 2 * _make_line(1).kernel[...])


# Where changes are made


def test_elements_of_a_variable_on_a_server_are_not_changed() -> None:
    strategy, coordinator = (made := make_strategy()), ClusterCoordinator(made)
    with strategy.scope():
        v = jaxdist.Variable(np.zeros((4, 2)), name="table")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: v.scatter_nd_add([[0, 1]], [1.0]),
        lambda: v[0].assign_add([1.0, 1.0]),
    )
    for call in calls:
        for run in (lambda fn: fn(), coordinator.schedule, strategy.run):
            with refused(
                UnsupportedError,
                "Elements or blocks of Variable 'table' were to be changed (scatter_add)",
                "Use scatter_add and the like with IndexedSlices",
            ):
                run(call)
    assert not v.numpy().any()


def test_a_change_that_no_scheduled_function_sends_is_refused() -> None:
    strategy = make_strategy()
    with strategy.scope():
        v = jaxdist.Variable(1.0, name="v")

    def add() -> None:
        v.assign_add(1.0)

    with refused(ContextError, "'v' of a parameter server was changed, or rows of it were read"):
        jaxdist.function(add)()
    with refused(UnsupportedError, "'v' of a parameter server", "or that another strategy runs"):
        jaxdist.MirroredStrategy(["cpu:0"]).run(add)
    assert v.numpy() == 1


def test_an_iterator_that_is_kept_after_its_function_has_no_batches() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    kept = []

    def keep(iterator: Any) -> Any:
        kept.append(iterator)
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.float32(1)]))
    assert coordinator.schedule(keep, (iterator,)).fetch() == 1
    for read in (next, lambda iterator: iterator.get_next()):
        with refused(
            ContextError, "after the function that got it had ended", "ClusterCoordinator.schedule"
        ):
            read(kept[0])
