"""One run of a job: it resumes from a checkpoint, trains, evaluates, saves, and writes files."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxdist._buckets import shorten_place
from jaxdist._checkpoints import Checkpoints, Interrupts, read_saved_notes
from jaxdist._processes import wait_until_ready
from jaxdist._reports import print_line
from jaxdist._strategies import Strategy
from jaxdist.data import DistributedIterator, batches
from jaxdist.errors import NonFiniteLossError
from jaxdist.jobs._config.changes import Changed, check_same_run
from jaxdist.jobs._config.checks import (
    check_not_beyond,
    check_output_is_ours,
    check_same_data,
    make_not_empty_error,
)
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import JobConfig
from jaxdist.jobs._names import versions
from jaxdist.jobs._run.finished import TrainingReport
from jaxdist.jobs._run.metrics import History, as_numbers, write_output
from jaxdist.jobs._run.progress import (
    Stopwatch,
    TrainingProgress,
    describe_communication,
    describe_run,
)
from jaxdist.jobs._run.run_state import RunState, TableFiles
from jaxdist.jobs._task import Task
from jaxdist.training import Every, evaluate, run_loop

# Note [What a resumed run checks]
# The notes of a checkpoint contain the configuration and the identity of the data of the run. When
# a run resumes, jaxdist checks four things:
# - The data is split in the same way (`check_same_data`). Otherwise the evaluation would use
#   examples that the model was trained on.
# - The checkpoint is not of a step after the end (`check_not_beyond`).
# - No entry changed that affects the training (`check_same_run`), unless the user accepts it.
#   The history records accepted changes, so that the metrics show where they happened.
# - The metrics file in the output directory is of this run (`check_output_is_ours`).
# `finished_run` also checks the configuration, before JAX starts.


class Run:
    """A run of a job, with its state."""

    def __init__(
        self,
        loaded: LoadedConfig[Any],
        strategy: Strategy,
        task: Task[Any],
        data: DistributedIterator,
        checkpoints: Checkpoints,
        console: Console,
    ) -> None:
        self.loaded, self.strategy, self.checkpoints = loaded, strategy, checkpoints
        self.config: JobConfig = loaded.values
        self.console, self.task, self.data = console, task, data
        self.state = RunState(*task.build(strategy), data)
        self.table_files = TableFiles(checkpoints.directory, self.state.remote_tables)
        self.first_step, self.step = 0, 0
        self.position = data.get_state()
        self.is_chief = not strategy.layout.is_shared or strategy.layout.process.is_first
        if strategy.layout.is_shared:
            checkpoints.on_failure(self._describe_last_step)
        self.was_interrupted = False
        self.pending: list[Any] = []
        self.saving: int | None = None
        self.watch = Stopwatch()
        self.began = time.perf_counter()
        self.progress: TrainingProgress  # while it trains
        self.interrupts = Interrupts()

    # Training

    def train(self) -> None:
        """Train up to the configured step, evaluate, save, and write the files."""
        config = self.config.training
        total = config.steps
        actions = [
            Every(config.log_every, self._log),
            Every(config.evaluate_every, self._evaluate),
            Every(self.config.checkpoint.every, self._save),
        ]
        self._say(self._describe())
        progress = TrainingProgress(
            total, first_step=self.first_step, console=self.console, unit=self.task.unit
        )
        with self.interrupts, progress as self.progress:
            end = run_loop(
                None,
                self._step,
                itertools.islice(self.data, total - self.first_step),
                on_output=self._collect,
                actions=actions,
                first_step=self.first_step,
            )
            self.step, self.was_interrupted = end.step, end.was_interrupted
            if self.was_interrupted:
                self._stop()
            else:
                self._finish()

    def _stop(self) -> None:
        """End after Ctrl-C."""
        # See Note [Ctrl-C between steps]: no step may run when the process exits.
        self._wait_for(self.pending)
        self._report_saved()

    def _describe(self) -> str:
        return describe_run(self.config, self.task, self.strategy, self.state.model)

    def _step(self, _: None, batch: Any) -> tuple[None, Any]:
        task = self.task
        call = (type(task).train_step, (self.state.model, self.state.optimizer, batch))
        if self.step == self.first_step:
            program = self.strategy.lower(*call, options=task.options)
            self._say(f"each step: {describe_communication(program)}")
        return None, self.strategy.run(*call, options=task.options)

    def _describe_last_step(self) -> tuple[int, Any, Callable[[], dict[str, Any]]]:
        """Return the state that one process saves when another one ends."""
        step, position = self.step, self.position

        def make_notes() -> dict[str, Any]:
            return self._make_notes(position, self.state.history_after(step, self.pending))

        return step, self.state.modules, make_notes

    def _make_notes(self, position: Any, history: History) -> dict[str, Any]:
        """Return the notes of a checkpoint."""
        return {
            "config": dataclasses.asdict(self.config),
            "position": position,
            "data": self.task.data.identity,
            "history": dataclasses.asdict(history),
        }

    def _wait_for(self, losses: Sequence[Any]) -> None:
        if self.strategy.layout.is_shared:
            seconds = self.strategy.communication.options.timeout_seconds
            leaves = jax.tree.leaves(losses)
            wait_until_ready(leaves, seconds, call="jobs.train", place="the losses")
        else:
            jax.block_until_ready(losses)

    def _collect(self, step: int, loss: Any) -> None:
        self.pending.append(loss)
        self.step, self.position = step, self.data.get_state()
        if step == self.first_step + 1:
            # The first step compiles, so throughput only counts the steps after it.
            self._wait_for([loss])
            self.watch.start()
        self.progress.advance(step)
        if not self.checkpoints.is_saving_in_progress():
            self._report_saved()
        # Between steps; see Note [Ctrl-C between steps].
        self.interrupts.check()

    def _fetch_losses(self) -> None:
        """Wait for the pending steps, and append their losses to the history.

        Raises:
            NonFiniteLossError: A loss is not finite.
        """
        # Fetch many losses at once: a fetch in each step would wait for the devices.
        self._wait_for(self.pending)
        found = self._get_outputs(self.pending)
        self.pending = []
        history = self.state.history
        losses = [as_numbers(x)["loss"] for x in found]
        bad = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
        if bad is not None:
            raise self._make_loss_error(len(history.losses) + bad, losses[bad - 1])
        history.add(found)

    def _get_outputs(self, pending: Sequence[Any]) -> list[Any]:
        """Return what steps have returned, on the host."""
        return list(jax.device_get(list(pending)))

    def _make_loss_error(self, step: int, loss: float) -> NonFiniteLossError:
        saved = self.checkpoints.steps()
        last = f"The last checkpoint is of step {saved[-1]}." if saved else "Nothing was saved."
        optimizer = self.config.optimizer
        clipped = f"{optimizer.clip_norm / 10:g}" if optimizer.clip_norm else "1.0"
        return NonFiniteLossError(
            f"The loss of step {step} is {loss}.\n\n"
            f"Training cannot recover from a loss that is not finite. {last}\n\n"
            f"Try --set optimizer.learning_rate={optimizer.learning_rate / 10:g}, or "
            f"--set optimizer.clip_norm={clipped}."
        )

    def _finish(self) -> None:
        self._fetch_losses()
        self.watch.stop()
        evaluated = self.state.history.evaluations
        # The last step may be one of the regular evaluations and saves.
        if not evaluated or evaluated[-1]["step"] != self.step:
            self._evaluate(self.step, None)
        if self.step not in self.checkpoints.steps():
            self._save(self.step, None)
        self._report_saved()
        # An interrupt here loses nothing: the checkpoint is complete.
        self.interrupts.check()
        found, text = self.task.finish(self.strategy, self.state.model)
        report, metrics = self.report(), self._make_metrics(found)
        if not self.is_chief:
            return
        written = write_output(self.config.output, metrics, self.task, report, self.state.history)
        self._say(f"wrote {' and '.join(map(shorten_place, written))}")
        if text:
            self._say(text)

    # Actions every n steps

    def _log(self, step: int, _: None) -> None:
        self._fetch_losses()
        speed = self.units_per_s() or 0.0
        left = (self.config.training.steps - step) * self._count_units_per_step()
        self.progress.report(
            step,
            loss=self.state.history.losses[-1],
            measures={name: found[-1] for name, found in self.state.history.measures.items()},
            speed=speed,
            seconds_left=left / speed if speed else 0.0,
        )

    def _evaluate(self, step: int, _: None) -> None:
        self._fetch_losses()
        held_out = batches(self.task.data.held_out, self.config.data.batch_size)
        step_fn = type(self.task).evaluation_step
        # Throughput counts only training.
        with self.watch.paused():
            means = evaluate(self.strategy, step_fn, self.state.model, held_out)
        measures = self.task.measures(means)
        self.state.history.evaluations.append({"step": step, **measures})
        self._say(f"step {step}: {self.task.in_words.format(**measures)}")

    def _save(self, step: int, _: None) -> None:
        # This raises for a loss that is not finite, so no checkpoint is saved after one.
        self._fetch_losses()
        self._report_saved()
        with self.watch.paused():
            notes = self._make_notes(self.data.get_state(), self.state.history)
            notes["tables"] = self.table_files.save(step)
            self.checkpoints.save(step, self.state.modules, notes)
        self.saving = step

    def _report_saved(self) -> None:
        """Wait for the checkpoint that is being written, and print its path."""
        if self.saving is not None:
            with self.watch.paused():
                self.checkpoints.wait_until_finished()
            self.table_files.remove_but(self.checkpoints.steps())
            step, self.saving = self.saving, None
            self._say(f"step {step}: saved {shorten_place(self.checkpoints.path(step))}")

    def _say(self, text: str) -> None:
        print_line(self.console, text)

    def units_per_s(self) -> float | None:
        """Return the throughput up to now; None before the second step."""
        # Leave out the first step, which compiles.
        units = (self.step - self.first_step - 1) * self._count_units_per_step()
        return units / self.watch.seconds if units > 0 and self.watch.seconds > 0 else None

    def _count_units_per_step(self) -> int:
        return self.config.data.batch_size * self.task.units_per_example

    # Beginning and end

    def resume(self, skip_damaged: bool, accept_changes: bool = False) -> None:
        """Resume from the newest checkpoint, if the directory has one."""
        steps = self.checkpoints.steps()
        if steps and not self.config.checkpoint.resume:
            raise make_not_empty_error(self.checkpoints.directory, steps)
        restored = None
        if steps:
            # Check before the arrays are read: with a changed entry their shapes may differ, and
            # that error would not name the entry.
            newest = read_saved_notes(self.checkpoints.directory, steps[-1])
            if newest is not None and not skip_damaged:
                self._check_notes(steps[-1], newest, accept_changes)
            restored = self.checkpoints.restore_latest(
                like=self.state.make_restore_target(self.strategy),
                skip_damaged=skip_damaged,
                stacks=self.task.stack if self.task.is_stacked else None,
            )
        if restored is None:
            # A run from the beginning must not overwrite the metrics of another run.
            check_output_is_ours(self.loaded, [])
            return
        # Check again: the restored checkpoint may not be the newest one.
        # See Note [What a resumed run checks].
        changes = self._check_notes(restored.step, restored.notes, accept_changes)
        check_output_is_ours(self.loaded, restored.notes["history"]["losses"])
        for path in restored.set_aside:
            self._say(f"damaged checkpoint moved to {shorten_place(path)}")
        self.table_files.load(restored.step, restored.notes.get("tables", {}))
        self.state.load(restored)
        self.position = self.data.get_state()
        self.first_step = self.step = restored.step
        where = shorten_place(self.checkpoints.path(restored.step))
        self._say(f"resumed from step {restored.step}: {where}")
        for line in self.state.note_changes(restored, changes, self.config):
            self._say(line)

    def _check_notes(
        self, step: int, notes: Mapping[str, Any], accept_changes: bool
    ) -> tuple[Changed, ...]:
        folder = self.checkpoints.directory
        check_same_data(folder, step, notes, self.task.data.identity)
        check_not_beyond(folder, step, self.config.training.steps)
        return check_same_run(
            folder, step, notes.get("config"), self.loaded, accept_changes=accept_changes
        )

    def report(self) -> TrainingReport:
        """Return the report of the run."""
        steps = self.checkpoints.steps()
        last = None if self.was_interrupted else self.state.history.evaluations[-1]
        return TrainingReport(
            steps=self.step,
            num_replicas=self.strategy.num_replicas_in_sync,
            unit=self.task.unit,
            evaluation=last,
            headline=None if last is None else self.task.headline.format(**last),
            units_per_s=self.units_per_s(),
            was_interrupted=self.was_interrupted,
            next_step=steps[-1] if steps else None,
        )

    def _make_metrics(self, found: dict[str, Any]) -> dict[str, Any]:
        history, task = self.state.history, self.task
        devices, last = self.strategy.mesh.devices.ravel(), history.evaluations[-1]
        return {
            task.curve.measure: last[task.curve.measure],
            "headline": task.headline.format(**last),
            "unit": task.unit,
            "steps": self.step,
            "replicas": self.strategy.num_replicas_in_sync,
            f"{task.unit}_per_s": self.units_per_s(),
            "wall_time_s": time.perf_counter() - self.began,
            "resumed_from_step": self.first_step or None,
            "devices": [str(d) for d in devices],
            "device_kind": devices[0].device_kind,
            "versions": versions(),
            "config": dataclasses.asdict(self.config),
            **found,
            **dataclasses.asdict(history),
        }
