"""The main job: a task on all replicas of a strategy, with checkpoints, evaluation and files."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console

from jaxdist.data import DistributedIterator, batches
from jaxdist.program import RunOptions
from jaxdist.strategies import Strategy
from jaxdist.training._checkpoints import Checkpoints
from jaxdist.training._checks import check_job, check_not_beyond, check_same_data, not_empty
from jaxdist.training._config import LoadedConfig, as_dict
from jaxdist.training._evaluate import evaluate
from jaxdist.training._loop import Every, run_loop
from jaxdist.training._metrics import History, draw_learning_curve, versions, write_metrics
from jaxdist.training._optimizer import make_optimizer
from jaxdist.training._progress import Stopwatch, TrainingProgress
from jaxdist.training._schema import JobConfig
from jaxdist.training._task import Task
from jaxdist.training._tasks import kind_of
from jaxdist.values import is_sharded


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """How a run ended.

    Attributes:
        steps: Steps done since the first run.
        num_replicas: Replicas of this run.
        unit: What is counted: images, bytes.
        evaluation: Measures of the last evaluation, None where the run was interrupted.
        headline: The same in words, None where the run was interrupted.
        units_per_s: Units trained on in a second, without the first step (it compiles),
            evaluation and checkpoints; None where fewer than two steps were run.
        was_interrupted: Whether Ctrl-C ended it.
        next_step: Step of the checkpoint that the next run resumes from, None where there is
            none.
    """

    steps: int
    num_replicas: int
    unit: str
    evaluation: dict[str, float] | None
    headline: str | None
    units_per_s: float | None
    was_interrupted: bool
    next_step: int | None


def train(
    loaded: LoadedConfig[Any],
    strategy: Strategy,
    *,
    console: Console,
    skip_damaged: bool = False,
) -> TrainingReport:
    """Train, evaluate, save and draw, as configured.

    Cost:
        One all-reduce of the gradients over the replicas for each step.

    Guarantees:
        With the same configuration a resumed run sees the batches, and has the losses, of an
        uninterrupted one. Each held-out example counts once in an evaluation.

    Args:
        loaded: From `load_job_config(...)`, or `load_config` with the schema of a task.
        strategy: Its replicas share each batch.
        console: Where to show progress.
        skip_damaged: Resume from the checkpoint before where the newest is damaged.

    Returns:
        How it ended. The metrics file and the picture are written unless it was interrupted.

    Raises:
        ConfigError: The batch does not fit the replicas or the data; the output directory
            cannot be made.
        CheckpointError: The newest checkpoint is damaged, of another model, or of other data.
        MissingExtraError: What the task needs is missing, or matplotlib where a picture is wanted.
    """
    config: JobConfig = loaded.values
    task = kind_of(config).make_task(config)
    check_job(
        loaded,
        num_replicas=strategy.num_replicas_in_sync,
        num_examples=len(jax.tree.leaves(task.train)[0]),
        examples=task.examples,
    )
    with (
        Checkpoints(config.checkpoint.directory, keep=config.checkpoint.keep) as checkpoints,
        _training_batches(config, strategy, task) as data,
    ):
        run = _Run(config, strategy, task, data, checkpoints, console)
        try:
            run.resume(skip_damaged)
            run.train()
        except KeyboardInterrupt:
            run.was_interrupted = True
        return run.report()


def _training_batches(config: JobConfig, strategy: Strategy, task: Task) -> DistributedIterator:
    """Global batches without end; all of one size, so that the step is compiled once."""
    source = batches(
        task.train,
        config.data.batch_size,
        shuffle=True,
        seed=config.data.seed,
        drop_remainder=True,
        repeat=None,
    )
    return iter(strategy.experimental_distribute_dataset(source))


class _Run:
    """One run of the job: what it holds while it goes on."""

    def __init__(
        self,
        config: JobConfig,
        strategy: Strategy,
        task: Task,
        data: DistributedIterator,
        checkpoints: Checkpoints,
        console: Console,
    ) -> None:
        self.config, self.strategy, self.checkpoints = config, strategy, checkpoints
        self.console, self.task, self.data = console, task, data
        self.history = History()
        with strategy.scope():
            self.model = task.make_model(nnx.Rngs(config.training.seed))
            optimizer = task.optimizer_config(config.optimizer)
            self.optimizer = make_optimizer(self.model, optimizer, num_steps=config.training.steps)
        task.place(strategy, self.model, self.optimizer)
        self.first_step, self.step = 0, 0
        self.was_interrupted = False
        self.pending: list[jax.Array] = []
        self.watch = Stopwatch()
        self.began = time.perf_counter()
        self.progress: TrainingProgress | None = None

    # Training

    def train(self) -> None:
        config = self.config.training
        total = config.steps
        actions = [
            Every(config.log_every, self._log),
            Every(config.evaluate_every, self._evaluate),
            Every(self.config.checkpoint.every, self._save),
        ]
        progress = TrainingProgress(
            total, first_step=self.first_step, console=self.console, unit=self.task.unit
        )
        with progress as self.progress:
            end = run_loop(
                None,
                self._step,
                itertools.islice(self.data, total - self.first_step),
                on_output=self._collect,
                actions=actions,
                first_step=self.first_step,
            )
            self.step, self.was_interrupted = end.step, end.was_interrupted
            if not self.was_interrupted:
                self._finish()

    def _step(self, _: None, batch: Any) -> tuple[None, jax.Array]:
        donated = (0, 1) if self.config.training.donate else ()
        options = RunOptions(donate_argnums=donated) if donated else None
        args = (self.model, self.optimizer, batch)
        return None, self.strategy.run(self.task.train_step, args=args, options=options)

    def _collect(self, step: int, loss: jax.Array) -> None:
        self.step = step
        self.pending.append(loss)
        if step == self.first_step + 1:
            jax.block_until_ready(loss)  # it compiled; throughput is about the steps after it
            self.watch.start()
        if self.progress is not None:
            self.progress.advance(step)

    def _settle(self) -> None:
        """Wait for the steps, and keep their losses."""
        self.history.losses += [float(x) for x in jax.device_get(self.pending)]
        self.pending = []

    def _finish(self) -> None:
        self._settle()
        self.watch.stop()
        evaluated = self.history.evaluations
        if not evaluated or evaluated[-1]["step"] != self.step:
            self._evaluate(self.step, None)
        if self.step not in self.checkpoints.steps():
            self._save(self.step, None)
        self._write_output()

    # What happens every so often

    def _log(self, step: int, _: None) -> None:
        self._settle()
        speed = self.units_per_s() or 0.0
        left = (self.config.training.steps - step) * self._units_per_step()
        if self.progress is not None:
            self.progress.report(
                step,
                loss=self.history.losses[-1],
                speed=speed,
                seconds_left=left / speed if speed else 0.0,
            )

    def _evaluate(self, step: int, _: None) -> None:
        self._settle()
        held_out = batches(self.task.held_out, self.config.data.batch_size)
        with self.watch.paused():
            means = evaluate(self.strategy, self.task.evaluation_step, self.model, held_out)
        measures = self.task.measures(means)
        self.history.evaluations.append({"step": step, **measures})
        self._say(f"step {step}: {self.task.in_words(measures)}")

    def _say(self, text: str) -> None:
        # A live bar of the same console stays below what is printed.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def units_per_s(self) -> float | None:
        units = (self.step - self.first_step - 1) * self._units_per_step()
        return units / self.watch.seconds if units > 0 and self.watch.seconds > 0 else None

    def _units_per_step(self) -> int:
        return self.config.data.batch_size * self.task.units_per_example

    # Checkpoints

    def _state(self) -> Any:
        modules = {"model": self.model, "optimizer": self.optimizer}
        return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}

    def _save(self, step: int, _: None) -> None:
        self._settle()
        notes = {
            "position": self.data.get_state(),
            "data": self.task.identity(),
            "history": dataclasses.asdict(self.history),
        }
        with self.watch.paused():
            self.checkpoints.save(step, self._state(), notes)
        self._say(f"step {step}: saved {_short(self.checkpoints.path(step))}")

    def resume(self, skip_damaged: bool) -> None:
        steps = self.checkpoints.steps()
        if not self.config.checkpoint.resume:
            if steps:
                raise not_empty(self.checkpoints.directory, steps)
            return
        restored = self.checkpoints.restore_latest(
            like=jax.tree.map(self._laid_out, self._state(), is_leaf=is_sharded),
            skip_damaged=skip_damaged,
        )
        if restored is None:
            return
        check_same_data(self.checkpoints.directory, restored, self.task.identity())
        check_not_beyond(self.checkpoints.directory, restored, self.config.training.steps)
        for path in restored.set_aside:
            self._say(f"damaged checkpoint moved to {_short(path)}")
        _load(self.model, restored.state["model"])
        _load(self.optimizer, restored.state["optimizer"])
        self.first_step = self.step = restored.step
        self.data.set_state(restored.notes["position"])
        self.history = History(**restored.notes["history"])
        where = _short(self.checkpoints.path(restored.step))
        self._say(f"resumed from step {restored.step}: {where}")

    def _laid_out(self, leaf: Any) -> Any:
        """How a leaf is to be restored: as it was placed, and else on every device."""
        if is_sharded(leaf) or getattr(leaf.sharding, "mesh", None) == self.strategy.mesh:
            return leaf
        whole = self.strategy.replicated_sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    # The end

    def report(self) -> TrainingReport:
        steps = self.checkpoints.steps()
        last = None if self.was_interrupted else self.history.evaluations[-1]
        return TrainingReport(
            steps=self.step,
            num_replicas=self.strategy.num_replicas_in_sync,
            unit=self.task.unit,
            evaluation=last,
            headline=None if last is None else self.task.headline(last),
            units_per_s=self.units_per_s(),
            was_interrupted=self.was_interrupted,
            next_step=steps[-1] if steps else None,
        )

    def _write_output(self) -> None:
        output, task = self.config.output, self.task
        report = self.report()
        last = self.history.evaluations[-1]
        found, text = task.finish(self.strategy, self.model)
        metrics = {
            **task.metrics(last),
            "steps": report.steps,
            "replicas": report.num_replicas,
            f"{task.unit}_per_s": report.units_per_s,
            "wall_time_s": time.perf_counter() - self.began,
            "resumed_from_step": self.first_step or None,
            "devices": [str(d) for d in self.strategy.mesh.devices.ravel()],
            "device_kind": self.strategy.mesh.devices.ravel()[0].device_kind,
            "versions": versions(),
            "config": as_dict(self.config),
            **found,
            **dataclasses.asdict(self.history),
        }
        folder = Path(output.directory)
        write_metrics(folder / output.metrics, metrics)
        if output.picture:
            title = f"{task.title}, {report.num_replicas} replicas, {report.headline}"
            draw_learning_curve(folder / output.picture, self.history, task.curve, title=title)
        if text:
            self._say(text)


def _load(module: nnx.Pytree, values: dict[str, Any]) -> None:
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(module, state)


def _short(path: Path) -> str:
    """The path from here where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
