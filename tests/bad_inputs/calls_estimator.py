"""Valid calls of the estimator."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import contrib, estimator
from tests.bad_inputs.call import Call, strategy

_X = np.ones((4, 2), np.float32)


@functools.cache
def _folder() -> pathlib.Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


def _new_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(dir=_folder()))


def _model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    model = estimator.get_module(lambda rngs: nnx.Linear(2, 1, rngs=rngs))
    predictions = model(features)
    return estimator.EstimatorSpec(
        mode,
        predictions={"y": predictions},
        loss=None if labels is None else jnp.mean((predictions - labels) ** 2),
        train_op=optax.sgd(0.1),
    )


def _input_fn() -> Any:
    return [(_X, _X[:, :1])]


@functools.cache
def _trained() -> pathlib.Path:
    folder = _new_folder()
    _make(folder).train(_input_fn)
    return folder


def _make(folder: pathlib.Path) -> estimator.Estimator:
    return estimator.Estimator(_model_fn, folder)


def _of_trained(method: str) -> Callable[[], Callable[..., Any]]:
    def call(**arguments: Any) -> Any:
        found = getattr(_make(_trained()), method)(**arguments)
        return list(found) if method == "predict" else found

    return lambda: call


def _train(**arguments: Any) -> Any:
    return _make(_new_folder()).train(**arguments)


def _in_model_fn(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    def call(**arguments: Any) -> Any:
        def model_fn(features: Any, mode: str) -> Any:
            found = fn(**arguments)
            model = found if callable(found) else estimator.get_module(_make_module)
            return estimator.EstimatorSpec(mode, loss=model(features).sum(), train_op=_SGD)

        return estimator.Estimator(model_fn, _new_folder()).train(lambda: [_X])

    return lambda: call


_SGD = optax.sgd(0.1)


def _make_module(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(2, 1, rngs=rngs)


def _make_features() -> Any:
    return _X


@functools.cache
def _exported() -> str:
    return _make(_trained()).export(_new_folder(), _X)


def _export_with(make: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    def call(**arguments: Any) -> Any:
        made = make()
        return made.export(_make(_trained()), str(_new_folder()), **arguments)

    return lambda: call


def _find_checkpoint() -> str:
    return str(_make(_trained()).latest_checkpoint())


def _stop() -> bool:
    return True


def _hook_arguments(**more: Any) -> dict[str, Any]:
    return {
        "estimator": _make(_trained()),
        "metric_name": "loss",
        **more,
        "eval_dir": _folder(),
        "min_steps": 0,
        "run_every_secs": None,
        "run_every_steps": 1,
    }


_EXPORTER = {"name": "best", "serving_input_receiver_fn": _make_features}
_OF = "jaxdist.estimator"

CALLS: dict[str, Call] = {
    f"{_OF}.Estimator": Call(
        lambda: estimator.Estimator,
        lambda: {
            "model_fn": _model_fn,
            "model_dir": _new_folder(),
            "config": estimator.RunConfig(),
            "params": {"a": 1},
            "warm_start_from": _trained(),
            "loss": None,
            "optimizer": None,
            "metrics": None,
        },
    ),
    f"{_OF}.Estimator.train": Call(
        lambda: _train,
        lambda: {
            "input_fn": _input_fn,
            "hooks": [estimator.SessionRunHook()],
            "steps": None,
            "max_steps": 1,
            "saving_listeners": [estimator.CheckpointSaverListener()],
        },
    ),
    f"{_OF}.Estimator.evaluate": Call(
        _of_trained("evaluate"),
        lambda: {
            "input_fn": _input_fn,
            "steps": 1,
            "hooks": [estimator.SessionRunHook()],
            "checkpoint_path": _find_checkpoint(),
            "name": "test",
        },
    ),
    f"{_OF}.Estimator.predict": Call(
        _of_trained("predict"),
        lambda: {
            "input_fn": _input_fn,
            "predict_keys": ["y"],
            "hooks": [estimator.SessionRunHook()],
            "checkpoint_path": _find_checkpoint(),
            "yield_single_examples": True,
        },
    ),
    f"{_OF}.Estimator.export": Call(
        _of_trained("export"),
        lambda: {
            "export_dir_base": _new_folder(),
            "features": _X,
            "checkpoint_path": _find_checkpoint(),
            "any_batch": True,
        },
    ),
    f"{_OF}.Estimator.latest_checkpoint": Call(_of_trained("latest_checkpoint")),
    f"{_OF}.Estimator.get_variable_names": Call(_of_trained("get_variable_names")),
    f"{_OF}.Estimator.get_variable_value": Call(
        _of_trained("get_variable_value"), lambda: {"name": "modules.model.kernel"}
    ),
    f"{_OF}.Estimator.eval_dir": Call(_of_trained("eval_dir"), lambda: {"name": "test"}),
    f"{_OF}.EstimatorSpec": Call(
        lambda: estimator.EstimatorSpec,
        lambda: {
            "mode": "eval",
            "predictions": {"y": jnp.ones(2)},
            "loss": jnp.float32(1),
            "train_op": optax.sgd(0.1),
            "eval_metric_ops": {"error": jnp.ones(2)},
            "export_outputs": None,
            "training_chief_hooks": [estimator.SessionRunHook()],
            "training_hooks": [estimator.SessionRunHook()],
            "evaluation_hooks": [estimator.SessionRunHook()],
            "prediction_hooks": [estimator.SessionRunHook()],
        },
    ),
    f"{_OF}.RunConfig": Call(
        lambda: estimator.RunConfig,
        lambda: {
            "model_dir": "a",
            "tf_random_seed": 1,
            "save_summary_steps": 1,
            "save_checkpoints_steps": 1,
            "save_checkpoints_secs": None,
            "keep_checkpoint_max": 1,
            "keep_checkpoint_every_n_hours": 1.0,
            "log_step_count_steps": 1,
            "train_distribute": strategy(),
            "eval_distribute": strategy(),
            "experimental_distribute": None,
        },
    ),
    f"{_OF}.RunConfig.replace": Call(lambda: estimator.RunConfig().replace),
    f"{_OF}.TrainSpec": Call(
        lambda: estimator.TrainSpec,
        lambda: {
            "input_fn": _input_fn,
            "max_steps": 1,
            "hooks": [estimator.SessionRunHook()],
            "saving_listeners": [estimator.CheckpointSaverListener()],
        },
    ),
    f"{_OF}.EvalSpec": Call(
        lambda: estimator.EvalSpec,
        lambda: {
            "input_fn": _input_fn,
            "steps": 1,
            "name": "test",
            "hooks": [estimator.SessionRunHook()],
            "exporters": estimator.FinalExporter("final", _make_features),
            "start_delay_secs": 1.0,
            "throttle_secs": 1.0,
        },
    ),
    f"{_OF}.train_and_evaluate": Call(
        lambda: estimator.train_and_evaluate,
        lambda: {
            "estimator": _make(_new_folder()),
            "train_spec": estimator.TrainSpec(_input_fn, max_steps=1),
            "eval_spec": estimator.EvalSpec(_input_fn),
        },
    ),
    f"{_OF}.get_module": Call(
        _in_model_fn(estimator.get_module), lambda: {"factory": _make_module, "name": "model"}
    ),
    f"{_OF}.get_global_step": Call(_in_model_fn(estimator.get_global_step)),
    f"{_OF}.load_export": Call(lambda: estimator.load_export, lambda: {"path": _exported()}),
    f"{_OF}.FinalExporter": Call(lambda: estimator.FinalExporter, lambda: dict(_EXPORTER)),
    f"{_OF}.LatestExporter": Call(
        lambda: estimator.LatestExporter, lambda: {**_EXPORTER, "exports_to_keep": 1}
    ),
    f"{_OF}.BestExporter": Call(
        lambda: estimator.BestExporter,
        lambda: {**_EXPORTER, "compare_fn": lambda **_: True, "exports_to_keep": 1},
    ),
    f"{_OF}.Exporter": Call(lambda: estimator.Exporter, lambda: {"name": "mine"}),
    f"{_OF}.DistributeConfig": Call(
        lambda: contrib.DistributeConfig,
        lambda: {"train_distribute": strategy(), "eval_distribute": None, "remote_cluster": None},
        use=lambda both: estimator.RunConfig(experimental_distribute=both),
    ),
    f"{_OF}.WarmStartSettings": Call(
        lambda: estimator.WarmStartSettings,
        lambda: {
            "ckpt_to_initialize_from": _trained(),
            "vars_to_warm_start": ".*",
            "var_name_to_prev_var_name": {"model.kernel": "model.kernel"},
        },
        use=lambda found: estimator.Estimator(
            _model_fn, _new_folder(), params={}, warm_start_from=found
        ).train(_input_fn),
    ),
    f"{_OF}.experimental.make_early_stopping_hook": Call(
        lambda: estimator.experimental.make_early_stopping_hook,
        lambda: {
            "estimator": _make(_trained()),
            "should_stop_fn": _stop,
            "run_every_secs": None,
            "run_every_steps": 1,
        },
    ),
    f"{_OF}.ModeKeys": Call(lambda: estimator.ModeKeys),
    f"{_OF}.TaskType": Call(lambda: estimator.TaskType),
    f"{_OF}.experimental.read_eval_metrics": Call(
        lambda: estimator.experimental.read_eval_metrics, lambda: {"eval_dir": _folder()}
    ),
    **{
        f"{_OF}.experimental.{name}": Call(
            lambda name=name: getattr(estimator.experimental, name),
            lambda more=more: _hook_arguments(**more),
        )
        for name, more in (
            ("stop_if_higher_hook", {"threshold": 1.0}),
            ("stop_if_lower_hook", {"threshold": 1.0}),
            ("stop_if_no_increase_hook", {"max_steps_without_increase": 1}),
            ("stop_if_no_decrease_hook", {"max_steps_without_decrease": 1}),
        )
    },
}
