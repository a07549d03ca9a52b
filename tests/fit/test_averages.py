"""`fit.SwapEMAWeights`: validations use the average of the parameters, on every strategy."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit, partition, training
from jaxdist.errors import ArgumentError, ContextError, UnsupportedError
from tests.fit.models import LOSS, Net, make_data, make_model, mirrored
from tests.parameter_server.strategy import version_1
from tests.parameter_server.strategy.making import make_strategy

DATA = make_data(20)
HELD_OUT = make_data(9, seed=5)
DECAY = 0.8
STEPS = 3  # of an epoch of batches of 8


class _Follow(fit.Callback):
    """Averages the parameters in NumPy, after each update."""

    def __init__(self, every: int = 1) -> None:
        self._every, self._count = every, 0
        self.average: list[np.ndarray] = []

    def on_train_begin(self, logs: Any) -> None:
        self.average = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._count += 1
        if self._count % self._every == 0:
            pairs = zip(self.average, self.model.get_weights(), strict=True)
            self.average = [DECAY * a + (1 - DECAY) * w for a, w in pairs]


def _adam() -> Any:
    return training.moving_average(optax.adam(0.05), DECAY)


def _fit(model: fit.Model, *callbacks: fit.Callback, epochs: int = 2) -> Any:
    held_out = (HELD_OUT.x, HELD_OUT.y)
    swap = fit.SwapEMAWeights()
    given: dict[str, Any] = {"callbacks": [*callbacks, swap], "verbose": 0, "shuffle": False}
    return model.fit(DATA.x, DATA.y, 8, epochs, validation_data=held_out, **given).history


def _average_of(model: fit.Model) -> list[np.ndarray]:
    with training.use_average(model.module, model.optimizer):
        return model.get_weights()


def _check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def _in_pieces() -> fit.Model:
    strategy = mirrored(4)
    with strategy.scope():
        module = Net()
        partition.place(strategy, module, partition.fsdp(min_bytes=0))
        model = fit.Model(module)
        model.compile(_adam(), LOSS)
    return model


def _sharded(**compile_args: Any) -> fit.Model:
    optimizer = jaxdist.sharded_update(_adam(), min_bytes=0)
    return make_model(mirrored(4), optimizer=optimizer, **compile_args)


MODELS: dict[str, Any] = {
    "one device": lambda: make_model(mirrored(1), optimizer=_adam()),
    "three replicas": lambda: make_model(mirrored(3), optimizer=_adam()),
    "virtual replicas": lambda: make_model(
        jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4), optimizer=_adam()
    ),
    "several workers": lambda: make_model(jaxdist.MultiWorkerMirroredStrategy(), optimizer=_adam()),
    "parameters in pieces": _in_pieces,
    "state in pieces": _sharded,
    "servers": lambda: make_model(make_strategy(servers=2, workers=1), optimizer=_adam()),
}


@pytest.fixture(scope="module")
def wanted() -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """The history, the parameters and the average of one device."""
    model, follow = make_model(mirrored(1), optimizer=_adam()), _Follow()
    history = _fit(model, follow)
    return history, model.get_weights(), follow.average


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_validates_with_the_average_of_numpy(name: str, wanted: Any) -> None:
    model = MODELS[name]()
    history = _fit(model)
    np.testing.assert_allclose(history["val_loss"], wanted[0]["val_loss"], rtol=1e-4)
    np.testing.assert_allclose(history["loss"], wanted[0]["loss"], rtol=1e-4)
    _check(model.get_weights(), wanted[1])
    _check(_average_of(model), wanted[2])
    # The validation of NumPy's average, by a model without one.
    plain = make_model(mirrored(1))
    plain.set_weights(wanted[2])
    loss = plain.evaluate(HELD_OUT.x, HELD_OUT.y, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-4)
    assert model.evaluate(HELD_OUT.x, HELD_OUT.y, verbose=0) != pytest.approx(loss, rel=1e-3)
    swap = [fit.SwapEMAWeights()]
    found = model.evaluate(HELD_OUT.x, HELD_OUT.y, verbose=0, callbacks=swap)
    assert found == pytest.approx(loss, rel=1e-4)
    outputs = model.predict(HELD_OUT.x, callbacks=swap)
    np.testing.assert_allclose(outputs, plain.predict(HELD_OUT.x), rtol=1e-3, atol=1e-5)
    # All is as it was, and training continues.
    _check(model.get_weights(), wanted[1])
    _fit(model, epochs=1)


def test_on_servers_training_continues_with_the_parameters(wanted: Any) -> None:
    """A validation writes the average to the servers, and the next epoch needs the parameters."""
    model = MODELS["servers"]()
    history = _fit(model)
    np.testing.assert_allclose(history["loss"], wanted[0]["loss"], rtol=1e-4)
    _check(model.get_weights(), wanted[1])
    _check(_average_of(model), wanted[2])


def test_several_steps_in_one_dispatch_move_the_average_as_often(wanted: Any) -> None:
    model = make_model(mirrored(2), optimizer=_adam(), steps_per_execution=2)
    _fit(model)
    _check(_average_of(model), wanted[2])


def test_accumulated_gradients_move_the_average_once_for_each_update() -> None:
    model = make_model(mirrored(2), optimizer=_adam(), gradient_accumulation_steps=2)
    follow = _Follow(every=2)
    _fit(model, follow)
    _check(_average_of(model), follow.average)


class _Normed(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(DATA.x.shape[1], 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def test_statistics_are_those_of_the_training() -> None:
    model = make_model(mirrored(2), _Normed(), optimizer=_adam())
    _fit(model)
    module: Any = model.module
    mean, scale = np.asarray(module.norm.mean[...]), np.asarray(module.norm.scale[...])
    with training.use_average(module, model.optimizer):
        np.testing.assert_array_equal(module.norm.mean[...], mean)
        assert np.abs(module.norm.scale[...] - scale).max() > 1e-4


def test_a_training_without_the_callback_validates_with_the_parameters() -> None:
    model = make_model(mirrored(2), optimizer=_adam())
    held_out = (HELD_OUT.x, HELD_OUT.y)
    history = model.fit(DATA.x, DATA.y, 8, validation_data=held_out, verbose=0).history
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(*held_out, verbose=0))


@pytest.mark.parametrize("name", ["three replicas", "state in pieces", "servers"])
def test_an_early_stop_restores_the_average_that_was_the_best(name: str) -> None:
    model = MODELS[name]()
    best: list[Any] = []

    class Keep(fit.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            best.append((logs["val_loss"], _average_of(self.model)))

    stop = fit.EarlyStopping(patience=1, restore_best_weights=True)
    # Other classes than in the training: sooner or later the loss rises.
    held_out = (HELD_OUT.x, (HELD_OUT.y + 1) % 3)
    given: dict[str, Any] = {"validation_data": held_out, "verbose": 0}
    callbacks = [Keep(), stop, fit.SwapEMAWeights()]
    model.fit(DATA.x, DATA.y, 8, epochs=30, callbacks=callbacks, **given)
    assert stop.stopped_epoch is not None
    value, weights = min(best, key=lambda entry: entry[0])
    _check(model.get_weights(), weights)
    for callbacks in ([], [fit.SwapEMAWeights()]):
        found = model.evaluate(*held_out, verbose=0, callbacks=callbacks)
        assert found == pytest.approx(value, rel=1e-4)
    model.fit(DATA.x, DATA.y, 8, callbacks=[fit.SwapEMAWeights()], **given)


def test_the_model_may_get_the_average_at_the_end(wanted: Any) -> None:
    model = make_model(mirrored(2), optimizer=_adam())
    given: dict[str, Any] = {"shuffle": False, "verbose": 0}
    swap = fit.SwapEMAWeights(overwrite_at_end=True)
    model.fit(DATA.x, DATA.y, 8, 2, callbacks=[swap], **given)
    _check(model.get_weights(), wanted[2])
    _check(_average_of(model), wanted[2])
    model.fit(DATA.x, DATA.y, 8, callbacks=[swap], **given)


def test_an_evaluation_that_fails_leaves_the_parameters() -> None:
    model = make_model(mirrored(2), optimizer=_adam())
    _fit(model)
    before = model.get_weights()

    def fail(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    failing = [fit.SwapEMAWeights(), fit.LambdaCallback(on_test_batch_end=fail)]
    with pytest.raises(KeyboardInterrupt):
        model.evaluate(HELD_OUT.x, HELD_OUT.y, verbose=0, callbacks=failing)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


class _Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", [1, 4])
def test_a_training_that_is_killed_and_resumed_has_the_same_average(
    tmp_path: pathlib.Path, after: int
) -> None:
    def train(folder: str, kill: int | None) -> tuple[Any, ...]:
        left = [0]

        def count(batch: int, logs: Any) -> None:
            left[0] += 1
            if left[0] == kill:
                raise _Killed

        save = fit.ModelCheckpoint(tmp_path / folder, resume=True, save_freq=1)
        model = make_model(mirrored(2), optimizer=_adam())
        history = _fit(model, save, fit.LambdaCallback(on_train_batch_end=count))
        return history["val_loss"], model.get_weights(), _average_of(model)

    with pytest.raises(_Killed):
        train("killed", after)
    losses, *weights = train("killed", None)
    wanted_losses, *wanted_weights = train("whole", None)
    assert losses == wanted_losses[-len(losses) :]
    for found, whole in zip(weights, wanted_weights, strict=True):
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_optimizer_without_an_average_is_an_error_before_training() -> None:
    model = make_model(mirrored(2))
    before = model.get_weights()
    with pytest.raises(ArgumentError, match=r"fit.SwapEMAWeights was given an optimizer whose"):
        _fit(model)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_of_version_1_may_not_put_the_average_on_the_servers() -> None:
    def script(strategy: Any, number: int) -> str:
        model = make_model(strategy, optimizer=_adam())
        with pytest.raises(UnsupportedError, match=r"train while one of them evaluates") as error:
            model.fit(DATA.x, DATA.y, 10, verbose=0, callbacks=[fit.SwapEMAWeights()])
        return str(error.value)

    assert len(version_1.run_workers(script, version_1.make_spec(workers=2, chief=True))) == 2


@pytest.mark.parametrize("method", ["fit", "train_on_batch", "save", "load"])
def test_methods_that_need_the_parameters_are_errors_in_the_block(
    method: str, tmp_path: pathlib.Path
) -> None:
    model = make_model(mirrored(2))
    model.compile(training.moving_average(optax.sgd(0.1)), LOSS)
    model.save(tmp_path)
    data = make_data(16)
    before = model.get_weights()
    given = (tmp_path,) if method in ("save", "load") else (data.x, data.y)

    def call() -> None:
        with training.use_average(model.module, model.optimizer):
            getattr(model, method)(*given)

    with pytest.raises(ContextError, match=f"fit.Model.{method} was called in a block"):
        call()
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_weights_that_are_loaded_after_compile_are_reported(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(mirrored(2))
    model.export_weights(tmp_path / "w.safetensors")
    model.load_weights(tmp_path / "w.safetensors")
    assert "the average of the optimizer" not in caplog.text
    model.compile(training.moving_average(optax.sgd(0.1)), LOSS)
    model.load_weights(tmp_path / "w.safetensors")
    assert "the average of the optimizer still has the parameters of compile" in caplog.text


def test_parameters_of_low_precision_have_their_dtype_in_the_block() -> None:
    module = nnx.Linear(2, 1, param_dtype=jax.numpy.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, training.moving_average(optax.sgd(0.1)), wrt=nnx.Param)
    with training.use_average(module, optimizer):
        assert module.kernel[...].dtype == jax.numpy.bfloat16
