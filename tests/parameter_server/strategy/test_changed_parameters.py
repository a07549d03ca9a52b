"""A function that updates parameters by an optimizer, and changes them in another way too."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ContextError
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

_X: Any = np.ones((1, 2), "float32")


def _make(seed: int = 0) -> tuple[Any, Any]:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def _update(model: Any, optimizer: Any, x: Any) -> None:
    optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))


def _clip(model: Any) -> None:
    model.kernel[...] = jnp.clip(model.kernel[...], -0.2, 0.2)


def _clip_before(model: Any, optimizer: Any, x: Any) -> None:
    _clip(model)
    _update(model, optimizer, x)


def _clip_after(model: Any, optimizer: Any, x: Any) -> None:
    _update(model, optimizer, x)
    _clip(model)


def _decay_before(model: Any, optimizer: Any, x: Any) -> None:
    model.kernel[...] *= 0.9
    _update(model, optimizer, x)


def _add_after(model: Any, optimizer: Any, x: Any) -> None:
    _update(model, optimizer, x)
    model.kernel[...] += 1


def _replace_before(model: Any, optimizer: Any, x: Any) -> None:
    model.kernel[...] = jnp.ones((2, 2))
    _update(model, optimizer, x)


def _keep_if_large(model: Any, optimizer: Any, x: Any) -> None:
    before = model.kernel[...]
    _update(model, optimizer, x)
    model.kernel[...] = jnp.where(x.sum() > 10, model.kernel[...], before)


_REFUSED = [_clip_before, _clip_after, _decay_before, _add_after, _replace_before, _keep_if_large]


@pytest.mark.parametrize("is_in_run", [False, True])
@pytest.mark.parametrize("step", _REFUSED)
def test_another_change_of_an_updated_parameter_is_refused(
    step: Callable[..., None], is_in_run: bool
) -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    model, optimizer = _make()
    start = np.asarray(model.kernel[...])

    def run(model: Any, optimizer: Any, x: Any) -> Any:
        return strategy.run(step, (model, optimizer, x))

    with refused(ContextError, "changes model.kernel itself, before or after optimizer.update"):
        coordinator.schedule(run if is_in_run else step, (model, optimizer, _X))
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), start)


def _perturb_for_the_gradient(model: Any, optimizer: Any, x: Any) -> None:
    kernel = model.kernel[...]
    model.kernel[...] = kernel + 0.1
    grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
    model.kernel[...] = kernel
    optimizer.update(model, grads)


def _update_in_a_branch(model: Any, optimizer: Any, x: Any) -> None:
    def skip(model: Any, optimizer: Any, x: Any) -> None:
        pass

    def update(model: Any, optimizer: Any, x: Any) -> None:
        _update(model, optimizer, x)

    nnx.cond(x.sum() > 0, update, skip, model, optimizer, x)


def _update_in_jit(model: Any, optimizer: Any, x: Any) -> None:
    nnx.jit(_update)(model, optimizer, x)


@pytest.mark.parametrize(
    "step", [_update, _perturb_for_the_gradient, _update_in_a_branch, _update_in_jit]
)
def test_a_parameter_that_only_the_optimizer_changes_is_updated(step: Callable[..., None]) -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    model, optimizer = _make()
    alone, own = _make()

    def run(model: Any, optimizer: Any, x: Any) -> Any:
        return strategy.run(step, (model, optimizer, x))

    for factor in (1, -1, 2):
        x = factor * _X
        coordinator.schedule(run, (model, optimizer, x)).fetch()
        step(alone, own, x)
    for name in ("kernel", "bias"):
        new, want = (np.asarray(getattr(m, name)[...]) for m in (model, alone))
        np.testing.assert_allclose(new, want, rtol=1e-5)


def test_the_change_can_be_a_function_of_its_own_or_part_of_the_optimizer() -> None:
    coordinator = ClusterCoordinator(make_strategy(workers=1))
    model, optimizer = _make()
    alone, own = _make()
    for _ in range(3):
        coordinator.schedule(_update, (model, optimizer, _X)).fetch()
        coordinator.schedule(_clip, (model,)).fetch()
        _clip_after(alone, own, _X)
    np.testing.assert_allclose(
        np.asarray(model.kernel[...]), np.asarray(alone.kernel[...]), rtol=1e-5
    )
    tx = optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())
    model, _ = _make()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    coordinator.schedule(_update, (model, optimizer, _X)).fetch()
    assert np.asarray(model.kernel[...]).min() >= 0
