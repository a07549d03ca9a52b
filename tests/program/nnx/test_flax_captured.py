"""NNX objects that a step closes over: reading works, writing is an error that says what to do."""

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
from jaxdist import get_replica_context
from jaxdist.errors import ContextError

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)


def _linear() -> Any:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def _rows(strategy: Any) -> Any:
    return jax.device_put(X, strategy.per_replica_sharding)


def test_a_captured_module_can_be_read_and_is_baked_in_as_it_was() -> None:
    strategy = jaxdist.MirroredStrategy()
    teacher = _linear()

    def step(x: Any) -> Any:
        return teacher(x)

    wanted = X @ np.asarray(teacher.kernel[...]) + np.asarray(teacher.bias[...])
    for _ in range(2):
        found = strategy.run(step, (_rows(strategy),))
        np.testing.assert_allclose(found.array, wanted, rtol=1e-5, atol=1e-6)
        # The program holds the values of the time when it was traced.
        teacher.bias[...] = teacher.bias[...] + 1


def test_a_passed_module_is_read_as_it_is() -> None:
    strategy = jaxdist.MirroredStrategy()
    teacher = _linear()

    def step(model: Any, x: Any) -> Any:
        return model(x)

    for _ in range(2):
        wanted = X @ np.asarray(teacher.kernel[...]) + np.asarray(teacher.bias[...])
        found = strategy.run(step, (teacher, _rows(strategy)))
        np.testing.assert_allclose(found.array, wanted, rtol=1e-5, atol=1e-6)
        teacher.bias[...] = teacher.bias[...] + 1


def _assigns(model: Any) -> Callable[..., Any]:
    def step(x: Any) -> None:
        model.bias[...] = model.bias[...] + x.sum()

    return step


def _replaces(model: Any) -> Callable[..., Any]:
    def step(x: Any) -> None:
        model.bias = nnx.Param(jnp.zeros(2))

    return step


def _differentiates(model: Any) -> Callable[..., Any]:
    def step(x: Any) -> Any:
        return nnx.grad(lambda m: m(x).sum())(model)

    return step


def _calls(model: Any) -> Callable[..., Any]:
    return lambda x: model(x)


def _updates(model: Any) -> Callable[..., Any]:
    return lambda x: model.update(values=x)


def _draws(model: Any) -> Callable[..., Any]:
    return lambda x: x + jax.random.normal(model.params(), x.shape)


def _held_in_a_list(model: Any) -> Callable[..., Any]:
    models = [model]

    def step(x: Any) -> None:
        models[0].bias[...] = x[0]

    return step


def _through_another_function(model: Any) -> Callable[..., Any]:
    inner = _assigns(model)

    def step(x: Any) -> None:
        inner(x)

    return step


def _as_a_partial(model: Any) -> Callable[..., Any]:
    def step(model: Any, x: Any) -> None:
        model.bias[...] = x[0]

    return functools.partial(step, model)


@pytest.mark.parametrize(
    ("make", "step_of", "words"),
    [
        (_linear, _assigns, ["model.bias, a Param", "model (Linear)"]),
        (_linear, _replaces, ["model, a Linear"]),
        (_linear, _differentiates, ["model.", "a Param", "model (Linear)"]),
        (lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)), _calls, ["a BatchStat", "model (BatchNorm)"]),
        (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), _calls, ["a RngCount", "model (Dropout)"]),
        (nnx.metrics.Average, _updates, ["a MetricState", "model (Average)"]),
        (lambda: nnx.Rngs(0), _draws, ["a RngCount", "model (Rngs)"]),
        (_linear, _held_in_a_list, ["models[0].bias, a Param", "models (list)"]),
        (_linear, _through_another_function, ["model.bias, a Param"]),
        (_linear, _as_a_partial, ["args[0].bias, a Param"]),
    ],
    ids=lambda v: getattr(v, "__name__", None) if callable(v) else "",
)
def test_a_captured_object_that_is_written_is_named_with_its_type(
    make: Any, step_of: Any, words: list[str]
) -> None:
    strategy = jaxdist.MirroredStrategy()
    model = make()
    before = _values(model)
    with pytest.raises(ContextError, match=r"(?s)closes over.*Pass the objects as arg") as error:
        strategy.run(step_of(model), (_rows(strategy),))
    for word in words:
        assert word in str(error.value)
    jax.tree.map(np.testing.assert_array_equal, before, _values(model))


def _values(model: Any) -> Any:
    state = nnx.state(model, nnx.Not(nnx.RngKey))
    return jax.tree.map(np.array, nnx.to_pure_dict(state))


def test_all_captured_objects_are_listed_as_arguments_to_pass() -> None:
    strategy = jaxdist.MirroredStrategy()
    model = _linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(x: Any) -> None:
        grads = nnx.grad(lambda m: m(x).sum())(model)
        optimizer.update(model, get_replica_context().all_reduce("mean", grads))

    with pytest.raises(ContextError, match=r"model \(Linear\), optimizer \(Optimizer\)") as error:
        strategy.run(step, (_rows(strategy),))
    assert "args=(model, optimizer, ...)" in str(error.value)


def test_a_model_passed_beside_an_optimizer_that_is_captured_is_no_cause() -> None:
    strategy = jaxdist.MirroredStrategy()
    model = _linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Any, x: Any) -> None:
        grads = nnx.grad(lambda m: m(x).sum())(model)
        optimizer.update(model, get_replica_context().all_reduce("mean", grads))

    with pytest.raises(ContextError, match="which it closes over") as error:
        strategy.run(step, (model, _rows(strategy)))
    assert "args=(optimizer, ...)" in str(error.value)


def test_a_single_variable_is_told_to_go_into_a_module() -> None:
    strategy = jaxdist.MirroredStrategy()
    count = nnx.Variable(jnp.zeros(()))

    def step(x: Any) -> None:
        count[...] = count[...] + 1

    with pytest.raises(ContextError, match=r"count, a Variable.*") as error:
        strategy.run(step, (_rows(strategy),))
    assert "nnx.Dict(value=count)" in str(error.value)

    def passed(held: Any) -> None:
        held.value[...] = held.value[...] + 1

    held = nnx.Dict(value=count)
    strategy.run(passed, (held,))
    assert float(held.value[...]) == 1


def test_a_fault_inside_the_step_stays_the_error_of_flax() -> None:
    # The teacher is only read; the model is captured by jax.grad, inside the step.
    strategy = jaxdist.MirroredStrategy()
    teacher = _linear()

    def step(model: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            model.bias[...] = w
            return (teacher(x) * w).sum()

        return jax.grad(loss_of)(jnp.ones(2))

    with pytest.raises(Exception, match="different trace level") as error:
        strategy.run(step, (_linear(), _rows(strategy)))
    assert not isinstance(error.value, ContextError)
    assert "pass it as an argument" in "".join(error.value.__notes__)


def test_another_value_error_of_the_step_passes_through() -> None:
    def step() -> None:
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step") as error:
        jaxdist.MirroredStrategy().run(step)
    assert not isinstance(error.value, ContextError)
