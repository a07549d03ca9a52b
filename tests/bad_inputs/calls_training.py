"""Valid calls of the training loop, checkpoints, configurations and jobs."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import rich.console

import jaxdist
from jaxdist import jobs, training
from tests.bad_inputs.call import Call, strategy

_SMALL = [
    "model.channels=[2]",
    "model.hidden=2",
    "training.steps=1",
    "optimizer.warmup_steps=0",
    "strategy.virtual_devices=2",
    'output.picture=""',
]
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"


@functools.cache
def _folder() -> pathlib.Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


def _new_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(dir=_folder()))


def _loaded() -> jobs.LoadedConfig[Any]:
    folder = _new_folder()
    return jobs.load_job_config(CONFIG, [*_SMALL, f'output.directory="{folder}"'])


def _job() -> Any:
    return jobs.load_job(CONFIG, _SMALL)


def _state() -> dict[str, Any]:
    return {"w": jnp.arange(3)}


def _saved(method: str) -> Any:
    def call(**arguments: Any) -> Any:
        with training.Checkpoints(_new_folder()) as checkpoints:
            checkpoints.save(7, _state(), {"epoch": 0})
            return getattr(checkpoints, method)(**arguments)

    return call


def _count(_: Any, batch: Any, mask: Any) -> dict[str, Any]:
    return training.weighted_sums({"x": batch["x"]}, mask)


def _step(state: Any, _: Any) -> tuple[Any, Any]:
    return state, None


def _keep(_: int, state: Any) -> None:
    del state


def _exported() -> pathlib.Path:
    path = _new_folder() / "w.safetensors"
    training.export_weights(_state(), path)
    return path


CALLS = {
    "jaxdist.training.Checkpoints": Call(
        lambda: training.Checkpoints,
        lambda: {"directory": _new_folder(), "keep": 1, "timeout_seconds": 60.0},
        use=lambda checkpoints: checkpoints.close(),
    ),
    "jaxdist.training.Checkpoints.close": Call(lambda: _saved("close")),
    "jaxdist.training.Checkpoints.steps": Call(lambda: _saved("steps")),
    "jaxdist.training.Checkpoints.wait_until_finished": Call(lambda: _saved("wait_until_finished")),
    "jaxdist.training.Checkpoints.is_saving_in_progress": Call(
        lambda: _saved("is_saving_in_progress")
    ),
    "jaxdist.training.Checkpoints.on_failure": Call(
        lambda: _saved("on_failure"), lambda: {"callback": _state}
    ),
    "jaxdist.training.Checkpoints.path": Call(lambda: _saved("path"), lambda: {"step": 7}),
    "jaxdist.training.Checkpoints.save": Call(
        lambda: _saved("save"), lambda: {"step": 8, "state": _state(), "notes": {"epoch": 1}}
    ),
    "jaxdist.training.Checkpoints.discard_after": Call(
        lambda: _saved("discard_after"), lambda: {"step": 7}
    ),
    "jaxdist.training.Checkpoints.restore": Call(
        lambda: _saved("restore"), lambda: {"state": _state()}
    ),
    "jaxdist.training.Checkpoints.restore_latest": Call(
        lambda: _saved("restore_latest"), lambda: {"like": _state()}
    ),
    "jaxdist.training.Weight": Call(lambda: training.Weight, lambda: {"name": "a"}),
    "jaxdist.training.Weight.transpose": Call(lambda: training.Weight("a").transpose, dict),
    "jaxdist.training.Weight.__getitem__": Call(
        lambda: training.Weight("a").__getitem__, lambda: {"index": 0}
    ),
    "jaxdist.training.Weight.reshape": Call(lambda: training.Weight("a").reshape, dict),
    "jaxdist.training.export_weights": Call(
        lambda: training.export_weights,
        lambda: {
            "model": _state(),
            "path": _new_folder() / "w.safetensors",
            "mapping": {},
            "ignore": ["a"],
            "max_shard_size": 100,
        },
    ),
    "jaxdist.training.load_weights": Call(
        lambda: training.load_weights,
        lambda: {"model": _state(), "path": _exported(), "mapping": {}, "ignore": ["a"]},
    ),
    "jaxdist.jobs.LoadedConfig.origin": Call(
        lambda: _loaded().origin, lambda: {"name": "training.steps"}
    ),
    "jaxdist.jobs.load_config": Call(
        lambda: jobs.load_config,
        lambda: {"schema": jobs.DigitsConfig, "path": CONFIG, "overrides": _SMALL},
    ),
    "jaxdist.jobs.load_job_config": Call(
        lambda: jobs.load_job_config, lambda: {"path": CONFIG, "overrides": _SMALL}
    ),
    "jaxdist.jobs.load_job": Call(
        lambda: jobs.load_job, lambda: {"path": CONFIG, "overrides": _SMALL}
    ),
    "jaxdist.jobs.kind_of": Call(lambda: jobs.kind_of, lambda: {"config": _loaded().values}),
    "jaxdist.jobs.make_strategy": Call(
        lambda: jobs.make_strategy, lambda: {"config": _loaded().values}
    ),
    "jaxdist.jobs.train": Call(
        lambda: jobs.train,
        lambda: {
            "loaded": _loaded(),
            "strategy": strategy(),
            "console": rich.console.Console(quiet=True),
        },
    ),
    "jaxdist.training.evaluate": Call(
        lambda: training.evaluate,
        lambda: {
            "strategy": strategy(),
            "sums_fn": _count,
            "model": 1.0,
            "dataset": jaxdist.data.batches({"x": np.arange(4.0)}, 2),
        },
    ),
    "jaxdist.training.weighted_sums": Call(
        lambda: (
            lambda **given: strategy().run(
                lambda _: training.weighted_sums(**given), (jnp.float32(1),)
            )
        ),
        lambda: {"per_row": {"x": jnp.ones(2)}, "weight": jnp.ones(2)},
    ),
    "jaxdist.training.require_extra": Call(
        lambda: training.require_extra,
        lambda: {"name": "scikit-learn", "purpose": "read the digits"},
    ),
    "jaxdist.training.Every": Call(
        lambda: training.Every,
        lambda: {"num_steps": 1, "act": _keep},
        use=lambda every: training.run_loop(0, _step, range(2), actions=[every]),
    ),
    "jaxdist.training.run_loop": Call(
        lambda: training.run_loop,
        lambda: {
            "state": 0,
            "step_fn": _step,
            "data": range(3),
            "on_output": _keep,
            "actions": [training.Every(1, _keep)],
            "first_step": 0,
        },
    ),
    "jaxdist.jobs.versions": Call(lambda: jobs.versions),
    "jaxdist.jobs.plan_job": Call(
        lambda: jobs.plan_job,
        lambda: {"job": _job(), "topology": "v5e:1x1", "quick": True},
    ),
    "jaxdist.jobs.sweep_job": Call(
        lambda: jobs.sweep_job, lambda: {"job": _job(), "topology": "v5e:1x1"}
    ),
    "jaxdist.jobs.DigitsConfig": Call(
        lambda: jobs.DigitsConfig,
        use=lambda config: jobs.TASKS["digits"](config).rules,
    ),
    "jaxdist.jobs.JobConfig": Call(lambda: jobs.JobConfig, lambda: {"task": "tasks:WineTask"}),
    "jaxdist.jobs.Curve": Call(
        lambda: jobs.Curve, lambda: {"measure": "loss", "label": "held-out loss"}
    ),
    "jaxdist.jobs.Data": Call(
        lambda: jobs.Data,
        lambda: {"train": np.ones(3), "held_out": np.ones(1), "identity": {"seed": 0}},
    ),
    "jaxdist.jobs.Table": Call(lambda: jobs.Table, lambda: {"make": _state}),
    "jaxdist.jobs.Table.create": Call(lambda: jobs.Table(_state).create),
    "jaxdist.jobs.entry": Call(
        lambda: jobs.entry,
        lambda: {"default": 1, "change": "never", "only_if": ("optimizer.update", "sharded")},
    ),
    "jaxdist.jobs.section": Call(lambda: jobs.section, lambda: {"kind": jobs.TrainingConfig}),
    "jaxdist.jobs.split_rows": Call(
        lambda: jobs.split_rows,
        lambda: {"arrays": np.arange(4), "test_fraction": 0.25, "seed": 0},
    ),
    "jaxdist.jobs.Task": Call(lambda: jobs.TASKS["digits"], lambda: {"config": _loaded().values}),
    "jaxdist.jobs.Task.lower": Call(
        lambda: _job().lower,
        lambda: {"strategy": strategy(), "rows": 8, "rules": "replicated"},
    ),
    "jaxdist.jobs.Task.with_rules": Call(
        lambda: _job().with_rules, lambda: {"rules": "replicated"}
    ),
    "jaxdist.jobs.Task.with_stages": Call(
        lambda: jobs.load_job("configs/topics_lm_pipeline.toml").with_stages,
        lambda: {"stages": 2},
    ),
    "jaxdist.jobs.Task.with_remat": Call(
        lambda: jobs.load_job("configs/topics_lm_fsdp.toml").with_remat,
        lambda: {"remat": "layers"},
    ),
}
