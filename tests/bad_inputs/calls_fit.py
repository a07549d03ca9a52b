"""Valid calls of `jaxdist.fit`, and of the update that its steps make."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import fit, training
from tests.bad_inputs.call import Call, strategy


@functools.cache
def _folder() -> pathlib.Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


def _new_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(dir=_folder()))


class _Net(nnx.Module):
    """A weight times the mean of the features, of which there may be any number."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones((1, 1)))

    def __call__(self, x: Any) -> Any:
        return jnp.mean(jnp.reshape(x, (x.shape[0], -1)), axis=1, keepdims=True) @ self.weight[...]


def _module() -> nnx.Module:
    return _Net()


def _model() -> fit.Model:
    """A compiled model, which makes its programs anew: no call sees the state of another."""
    with strategy().scope():
        model = fit.Model(_module())
        model.compile("sgd", "mse")
    return model


def _x() -> np.ndarray:
    return np.arange(8, dtype=np.float32).reshape(4, 2) / 8


def _y() -> np.ndarray:
    return np.arange(4, dtype=np.float32)[:, None] % 2


def _method(name: str, **arguments: Any) -> Call:
    return Call(lambda: getattr(_model(), name), lambda: {k: v() for k, v in arguments.items()})


def _quiet() -> int:
    return 0


def _train(callback: fit.Callback) -> None:
    """Train with a callback: what it was given is used."""
    given: dict[str, Any] = {"epochs": 2, "verbose": 0, "callbacks": [callback]}
    _model().fit(_x(), _y(), 2, validation_data=(_x(), _y()), **given)


class _Tracker:
    """A tracker that needs floats and integers."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert all(isinstance(value, float) for value in metrics.values())
        assert isinstance(step, int)

    def close(self, completed: bool) -> None:
        assert completed


def _averaged() -> tuple[nnx.Module, Any]:
    with strategy().scope():
        module = _module()
        made = nnx.Optimizer(module, training.moving_average(optax.sgd(0.1)), wrt=nnx.Param)
    return module, made


def _use_average(**given: Any) -> None:
    """Enter a block with the average."""
    with training.use_average(**given):
        pass


def _train_with_average(callback: fit.Callback) -> None:
    """Train with a callback and an optimizer that keeps an average."""
    with strategy().scope():
        model = fit.Model(_module())
        model.compile(training.moving_average(optax.sgd(0.1)), "mse")
    model.fit(_x(), _y(), 2, validation_data=(_x(), _y()), verbose=0, callbacks=[callback])


def _measure(metric: fit.Metric) -> None:
    """Compute a metric."""
    sums = metric.sums(_y(), jnp.stack([_y()[:, 0]] * 3, 1), jnp.ones(4))
    metric.result({name: np.asarray(value) for name, value in sums.items()})


def _measure_decisions(metric: fit.Metric) -> None:
    """Compute a metric of one output."""
    sums = metric.sums(_y(), jnp.asarray(_y()), jnp.ones(4))
    metric.result({name: np.asarray(value) for name, value in sums.items()})


@functools.cache
def _history() -> fit.History:
    history = fit.History({"loss": [2.0, 1.0]}, [0, 1])
    # The first drawing makes folders of matplotlib.
    history.plot()
    return history


def _saved() -> pathlib.Path:
    folder = _new_folder()
    _model().save(folder)
    return folder


def _error(y_true: Any, y_pred: Any) -> Any:
    return jnp.abs(y_true - y_pred[:, :1])


def _update(**given: Any) -> Any:
    with strategy().scope():
        module = _module()
        made = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Any, optimizer: Any) -> Any:
        grads = nnx.state(model, nnx.Param)
        found: dict[str, Any] = {"model": model, "optimizer": optimizer, "grads": grads, **given}
        return training.reduce_and_update(**found)

    return strategy().run(step, (module, made))


def _update_arguments() -> dict[str, Any]:
    return {"count": 2, "sums": {"loss": jnp.float32(1)}}


def _decide(kind: Any) -> Call:
    return Call(lambda: kind, lambda: {"threshold": 0.5}, use=_measure_decisions)


def _exported() -> Any:
    path = _new_folder() / "w.safetensors"
    _model().export_weights(path)
    return path


CALLS = {
    "jaxdist.training.moving_average": Call(
        lambda: training.moving_average, lambda: {"tx": optax.sgd(0.1), "decay": 0.9}
    ),
    "jaxdist.training.use_average": Call(
        lambda: _use_average, lambda: dict(zip(("model", "optimizer"), _averaged(), strict=True))
    ),
    "jaxdist.training.reduce_and_update": Call(lambda: _update, _update_arguments),
    "jaxdist.fit.Model": Call(
        lambda: fit.Model, lambda: {"module": _module(), "strategy": strategy()}
    ),
    "jaxdist.fit.Model.compile": _method("compile", optimizer=lambda: "sgd", loss=lambda: "mse"),
    "jaxdist.fit.Model.fit": _method("fit", x=_x, y=_y, verbose=_quiet),
    "jaxdist.fit.Model.evaluate": _method("evaluate", x=_x, y=_y, verbose=_quiet),
    "jaxdist.fit.Model.predict": _method("predict", x=_x, verbose=_quiet),
    "jaxdist.fit.Model.train_on_batch": _method("train_on_batch", x=_x, y=_y),
    "jaxdist.fit.Model.test_on_batch": _method("test_on_batch", x=_x, y=_y),
    "jaxdist.fit.Model.predict_on_batch": _method("predict_on_batch", x=_x),
    "jaxdist.fit.Model.save": _method("save", directory=_new_folder),
    "jaxdist.fit.Model.load": _method("load", directory=_saved),
    "jaxdist.fit.Model.get_weights": _method("get_weights"),
    "jaxdist.fit.Model.set_weights": _method("set_weights", weights=lambda: _model().get_weights()),
    "jaxdist.fit.Model.export_weights": _method(
        "export_weights", path=lambda: _new_folder() / "w.safetensors"
    ),
    "jaxdist.fit.Model.load_weights": _method("load_weights", path=_exported),
    "jaxdist.fit.Model.summary": _method("summary"),
    "jaxdist.fit.Summary.parts": Call(lambda: _model().summary().parts),
    "jaxdist.fit.History.plot": Call(lambda: _history().plot),
    "jaxdist.fit.LambdaCallback": Call(lambda: fit.LambdaCallback, use=_train),
    "jaxdist.fit.CSVLogger": Call(
        lambda: fit.CSVLogger, lambda: {"filename": _new_folder() / "log.csv"}, use=_train
    ),
    "jaxdist.fit.JSONLogger": Call(
        lambda: fit.JSONLogger, lambda: {"filename": _new_folder() / "log.jsonl"}, use=_train
    ),
    "jaxdist.fit.TensorBoard": Call(
        lambda: fit.TensorBoard, lambda: {"log_dir": _new_folder()}, use=_train
    ),
    "jaxdist.fit.TrackerLogger": Call(
        lambda: fit.TrackerLogger, lambda: {"make": _Tracker}, use=_train
    ),
    "jaxdist.fit.Profiler": Call(lambda: fit.Profiler, lambda: {"log_dir": _new_folder()}),
    "jaxdist.fit.LearningRateScheduler": Call(
        lambda: fit.LearningRateScheduler,
        lambda: {"schedule": lambda epoch, rate: rate / (epoch + 1)},
        use=_train,
    ),
    "jaxdist.fit.ReduceLROnPlateau": Call(
        lambda: fit.ReduceLROnPlateau, lambda: {"patience": 1}, use=_train
    ),
    "jaxdist.fit.SwapEMAWeights": Call(lambda: fit.SwapEMAWeights, use=_train_with_average),
    "jaxdist.fit.EarlyStopping": Call(lambda: fit.EarlyStopping, use=_train),
    "jaxdist.fit.ModelCheckpoint": Call(
        lambda: fit.ModelCheckpoint,
        lambda: {"directory": _new_folder(), "save_best_only": True},
        use=_train,
    ),
    "jaxdist.fit.ModelCheckpoint.epochs_done": Call(
        lambda: fit.ModelCheckpoint(_new_folder()).epochs_done
    ),
    "jaxdist.fit.ModelCheckpoint.restore": Call(
        lambda: fit.ModelCheckpoint(_new_folder()).restore, lambda: {"model": _model()}
    ),
    "jaxdist.fit.Mean": Call(lambda: fit.Mean, lambda: {"function": _error}, use=_measure),
    "jaxdist.fit.Accuracy": Call(lambda: fit.Accuracy, use=_measure),
    "jaxdist.fit.TopKAccuracy": Call(lambda: fit.TopKAccuracy, lambda: {"k": 2}, use=_measure),
    "jaxdist.fit.RootMeanSquaredError": Call(
        lambda: fit.RootMeanSquaredError, use=_measure_decisions
    ),
    **{
        f"jaxdist.fit.{kind.__name__}": _decide(kind)
        for kind in (fit.BinaryAccuracy, fit.Precision, fit.Recall)
    },
}
