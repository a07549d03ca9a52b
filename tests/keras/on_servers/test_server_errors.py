"""What parameter servers refuse of Keras, and models after an error."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from jaxdist._keras_servers.variables import ModelOnServers
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ClosureInputError, PSUnavailableError, UnsupportedError
from tests.keras.models import make_data
from tests.keras.on_servers.servers import LOSS, make_model
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

K, L = keras.optimizers, keras.layers
DATA = make_data(16)


def _fit(model: Any, **more: Any) -> Any:
    return model.fit(DATA.x, DATA.y, batch_size=8, verbose=0, **more)


class OwnTrain(keras.Model):
    """A model with a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:  # pyrefly: ignore[bad-override]
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def test_a_train_step_of_the_user_is_refused_with_what_to_override() -> None:
    with make_strategy().scope():
        model = OwnTrain()
        model.compile("sgd", LOSS)
    with refused(UnsupportedError, "OwnTrain has a train_step of its own", "compute_loss"):
        _fit(model)


@pytest.mark.parametrize("option", ["run_eagerly=True", "jit_compile=False"])
def test_steps_op_by_op_are_refused(option: str) -> None:
    name, _, value = option.partition("=")
    options: dict[str, Any] = {name: value == "True"}
    model = make_model(make_strategy(), **options)
    with refused(UnsupportedError, option, "compiled programs"):
        _fit(model)
    with refused(UnsupportedError, "evaluate of the Keras model", option):
        model.evaluate(DATA.x, DATA.y, verbose=0)


def test_an_optimizer_that_chooses_the_scale_of_the_loss_is_refused() -> None:
    model = make_model(make_strategy(), lambda: K.LossScaleOptimizer(K.SGD(0.1)))
    with refused(UnsupportedError, "LossScaleOptimizer", "mixed_bfloat16"):
        _fit(model)


def test_the_global_norm_of_accumulated_gradients_is_refused() -> None:
    model = make_model(
        make_strategy(), lambda: K.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=1.0)
    )
    with refused(UnsupportedError, "gradient_accumulation_steps=2", "clipnorm or clipvalue"):
        _fit(model)


class Sum(K.SGD):
    """An optimizer whose state is of the gradients of all variables."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.total = self.add_variable((), initializer="zeros", name="total")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        self.total.assign(sum(keras.ops.sum(g) for g in grads))


def test_state_of_all_gradients_that_no_update_needs_is_refused_too() -> None:
    model = make_model(make_strategy(), lambda: Sum(0.1))
    before = model.get_weights()
    with refused(UnsupportedError, "couples variables"):
        _fit(model)
    # Keras had taken the arrays from the variables.
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


class Peak(keras.metrics.Metric):
    """The largest loss of a batch."""

    def __init__(self) -> None:
        super().__init__(name="peak")
        self.most = self.add_weight(name="most", initializer="zeros")

    # pyrefly: ignore[bad-override]
    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most.value, value))

    def result(self) -> Any:
        return self.most.value


class OwnLoss(keras.Model):
    """A model whose compute_loss updates a metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.dense, self.seen = L.Dense(3, activation="softmax"), metric

    def call(self, x: Any) -> Any:  # pyrefly: ignore[bad-override]
        return self.dense(x)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.seen.update_state(loss)
        return loss


def test_compute_loss_may_update_sums_and_no_other_metric() -> None:
    with make_strategy().scope():
        model = OwnLoss(keras.metrics.Mean("seen"))
        model.compile(K.SGD(0.0), LOSS)
        other = OwnLoss(Peak())
        other.compile("sgd", LOSS)
    history = _fit(model).history
    assert history["seen"] == pytest.approx(history["loss"], rel=1e-5)
    with refused(UnsupportedError, "changes the metric variables", "compute_metrics"):
        _fit(other)


def test_after_an_error_of_the_data_the_model_has_the_weights_of_all_steps_before() -> None:
    strategy = make_strategy(workers=2)
    model = make_model(strategy)

    def make_batches() -> Iterator[Any]:
        for _ in range(6):
            yield DATA.x[:8], DATA.y[:8]
        raise ValueError("the file ends here")

    with pytest.raises(ValueError, match="the file ends here"):
        model.fit(make_batches(), steps_per_epoch=10, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.value) == 6
    assert ClusterCoordinator(strategy).statistics().pending == 0
    assert np.isfinite(_fit(model).history["loss"][0])
    assert int(model.optimizer.iterations.value) == 8


def test_a_batch_that_does_not_fit_is_refused_and_the_model_trains_on() -> None:
    model = make_model(make_strategy(workers=2))
    _fit(model)

    def make_batches() -> Iterator[Any]:
        yield DATA.x[:8], DATA.y[:8]
        yield DATA.x[:8, :3], DATA.y[:8]

    with pytest.raises(Exception, match="3"):
        model.fit(make_batches(), steps_per_epoch=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.value) == 3
    _fit(model)
    assert int(model.optimizer.iterations.value) == 5


class _Beside(keras.callbacks.Callback):
    """Schedules a function that fails, after the last step of an epoch."""

    def __init__(self, strategy: Any, last: int) -> None:
        super().__init__()
        self._coordinator, self._last = ClusterCoordinator(strategy), last

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < self._last:
            return
        batches = iter(self._coordinator.create_per_worker_dataset(_cannot_read_on))
        _, failed = (self._coordinator.schedule(_add_up, (batches,)) for _ in range(2))
        # The steps before it have run: there is one worker.
        with pytest.raises(ClosureInputError, match="the disk is gone"):
            failed.fetch()


def _add_up(batches: Any) -> Any:
    return next(batches).sum()


def _cannot_read_on() -> Iterator[Any]:
    yield np.ones(2, np.float32)
    raise OSError("the disk is gone")


def test_an_error_that_is_found_when_values_come_back_leaves_the_model_those_of_all_steps() -> None:
    strategy = make_strategy(workers=1)
    model, other = make_model(strategy), make_model(make_strategy(workers=1))
    with refused(ClosureInputError, "the disk is gone"):
        _fit(model, shuffle=False, callbacks=[_Beside(strategy, last=1)])
    _fit(other, shuffle=False)
    assert int(model.optimizer.iterations.value) == 2
    for found, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
    # It was raised once, and the model trains on.
    _fit(model)
    assert int(model.optimizer.iterations.value) == 4


def test_servers_that_are_lost_when_values_come_back_leave_the_model_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(make_strategy(workers=1))
    before = model.get_weights()

    def fetch(*_: Any) -> Any:
        raise PSUnavailableError("ps 0 does not answer.", [0])

    with monkeypatch.context() as patch:
        patch.setattr(ModelOnServers, "fetch", fetch)
        with pytest.raises(PSUnavailableError):
            _fit(model)
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    # The servers have the two steps, and it trains on with them.
    _fit(model)
    assert int(model.optimizer.iterations.value) == 4


@keras.saving.register_keras_serializable("tests")
class Counted(L.Layer):
    """A layer with a count."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(name="count", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:  # pyrefly: ignore[bad-override]
        return x


class CountsInLoss(keras.Sequential):
    """A model whose compute_loss counts in a layer."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.layers[0].count.assign_add(1.0)
        return super().compute_loss(*args, **kwargs)


def test_state_of_a_layer_that_compute_loss_assigns_is_refused() -> None:
    with make_strategy().scope():
        model = CountsInLoss([Counted(), L.Dense(3, activation="softmax")])
        model.compile("sgd", LOSS)
    with refused(UnsupportedError, "compute_loss", "count", "in the call of the layer"):
        _fit(model)
