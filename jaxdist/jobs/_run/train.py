"""`train`: trains a task on all replicas, or on workers of parameter servers."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from jaxdist._buckets import as_place
from jaxdist._called import called
from jaxdist._checkpoints import Checkpoints, lock_folder
from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy, RemoteValue
from jaxdist._reports import print_line
from jaxdist._strategies import Strategy, check_strategy
from jaxdist._validate import as_flag, check_instance
from jaxdist.data import DistributedIterator, InputOptions, batches
from jaxdist.jobs._config.checks import check_job, find_output
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import JobConfig
from jaxdist.jobs._run.finished import TrainingReport, finished_line, finished_run
from jaxdist.jobs._run.progress import count_parameters
from jaxdist.jobs._run.run import Run
from jaxdist.jobs._task import Task
from jaxdist.jobs._tasks import kind_of

# How many steps of each worker may be queued: enough that no worker waits, and so few that
# evaluations and Ctrl-C come soon.
_QUEUED = 4


class ServerRun(Run):
    """A run in which workers take steps from a queue, with their batches."""

    def __init__(
        self, loaded: LoadedConfig[Any], strategy: ParameterServerStrategy, *others: Any
    ) -> None:
        super().__init__(loaded, strategy, *others)
        self.coordinator = ClusterCoordinator(strategy)
        self._servers, self._workers = len(strategy.storage.links), len(strategy.links())
        self._most = _QUEUED * self._workers
        self._queued: deque[RemoteValue] = deque()
        train_step = type(self.task).train_step

        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            return strategy.run(train_step, (model, optimizer, batch))

        self._scheduled_step = step

    def _describe(self) -> str:
        return (
            f"{self.task.title}: {count_parameters(self.state.model):,} parameters on "
            f"{self._servers} server(s), {self._workers} asynchronous worker(s), "
            f"{self.config.data.batch_size} {self.task.examples} a step"
        )

    def _step(self, _: None, batch: Any) -> tuple[None, Any]:
        if len(self._queued) == self._most:
            self._queued.popleft().get()
        args = (self.state.model, self.state.optimizer, batch)
        loss = self.coordinator.schedule(self._scheduled_step, args)
        self._queued.append(loss)
        return None, loss

    def _wait_for(self, losses: Sequence[Any]) -> None:
        self.coordinator.join()

    def _get_outputs(self, pending: Sequence[Any]) -> list[Any]:
        return [loss.fetch() for loss in pending]

    def _evaluate(self, step: int, _: None) -> None:
        self.coordinator.join()
        super()._evaluate(step, _)

    def _save(self, step: int, _: None) -> None:
        # Save the state after all steps up to this one, and no later one.
        self.coordinator.join()
        super()._save(step, _)

    def _stop(self) -> None:
        self.coordinator.join()
        # Steps that are queued at Ctrl-C have their batches already. They are few, so they run, and
        # their result is saved. If a second Ctrl-C interrupts the scheduling of a step, that step
        # may have changed the state but is not counted; then nothing is saved.
        scheduled = self.coordinator.statistics().scheduled
        if scheduled == self.step - self.first_step and self.step not in self.checkpoints.steps():
            self._save(self.step, None)
        self._report_saved()

    def _make_metrics(self, found: dict[str, Any]) -> dict[str, Any]:
        counts = self.coordinator.statistics()
        own = {
            "scheduled": counts.scheduled,
            "applied": counts.applied,
            "lost": counts.lost,
            "staleness": {str(late): n for late, n in sorted(counts.staleness.items())},
        }
        return super()._make_metrics({**found, "parameter_servers": own})


_LOADED = ("what load_job_config returns", "Pass load_job_config(path).")
_CONSOLE = ("a rich.console.Console", "Pass rich.console.Console(), or with quiet=True.")


@called("jobs.train")
def train(
    loaded: LoadedConfig[Any],
    strategy: Strategy,
    *,
    console: Console,
    skip_damaged: bool = False,
    accept_changes: bool = False,
) -> TrainingReport:
    """Train a task as configured, with evaluation, checkpoints, metrics and a picture.

    Cost:
        One all-reduce of the gradients over the replicas in each step.

    In a job of several processes, all of them call this. The first one shows the progress and
    writes the metrics and the picture. If a process ends, another saves the last complete step.

    Guarantees:
        With the same configuration, a resumed run has the batches and the losses of an
        uninterrupted one. Each held-out example counts once in an evaluation. No checkpoint is
        written after a loss that is not finite. No other job trains in the same folders.
        The files of a finished run do not change.

    Args:
        loaded: From `load_job_config(...)`, or `load_config` with the schema of a task.
        strategy: The strategy. Its replicas share each batch.
        console: The console that shows the progress.
        skip_damaged: If the newest checkpoint is damaged, resume from the one before it.
        accept_changes: Resume even if relevant entries, such as `optimizer.learning_rate`, differ
            from those of the checkpoint.

    Returns:
        The report. The metrics file and the picture are written unless the run was interrupted or
        was finished before.

    Raises:
        ConfigError: The batch does not fit the replicas or the data; a file of the output cannot
            be written, or belongs to another run.
        CheckpointError: The newest checkpoint is damaged, of another model, of other data, or
            trained with other values; or another job uses the folder.
        NonFiniteLossError: A loss is not finite.
        MissingExtraError: A package that the task needs is not installed, or matplotlib if a
            picture is configured.
    """
    check_instance("loaded", loaded, LoadedConfig, *_LOADED)
    check_strategy(strategy)
    check_instance("console", console, Console, *_CONSOLE)
    as_flag("skip_damaged", skip_damaged)
    as_flag("accept_changes", accept_changes)
    config: JobConfig = loaded.values
    layout = strategy.layout
    if layout.is_shared and not layout.process.is_first:
        # Only one process prints, and writes the metrics and the picture.
        console = Console(quiet=True)
    finished = finished_run(loaded, accept_changes=accept_changes)
    if finished is not None:
        print_line(console, finished_line(finished, loaded))
        return finished
    # Load the data first: the checks need its size.
    task = kind_of(config)(config)
    check_job(
        loaded,
        num_replicas=strategy.num_replicas_in_sync,
        num_examples=len(jax.tree.leaves(task.data.train)[0]),
        examples=task.examples,
    )
    if isinstance(strategy, ParameterServerStrategy):
        # Batches go to the workers with the steps, and evaluations run here.
        strategy._allow_work_here()
    # `Checkpoints` would only lock its folder at the first save; until then two jobs could train.
    # Both folders may be the same: a process can take a lock several times.
    with (
        lock_folder(as_place("directory", config.checkpoint.directory, "runs/job")),
        lock_folder(find_output(config.output)),
        Checkpoints(config.checkpoint.directory, keep=config.checkpoint.keep) as checkpoints,
        _make_batches(config, strategy, task) as data,
    ):
        others = task, data, checkpoints, console
        run = (
            ServerRun(loaded, strategy, *others)
            if isinstance(strategy, ParameterServerStrategy)
            else Run(loaded, strategy, *others)
        )
        try:
            run.resume(skip_damaged, accept_changes)
            run.train()
        except KeyboardInterrupt:
            # Ctrl-C came before or after the loop, which catches its own.
            run.was_interrupted = True
        return run.report()


def _make_batches(config: JobConfig, strategy: Strategy, task: Task[Any]) -> DistributedIterator:
    """Return endless global batches. All have one size, so that the step is compiled once.

    If the replicas do not divide a batch, its rows are spread as evenly as possible, so that no
    replica is without rows.
    """
    source = batches(
        task.data.train,
        config.data.batch_size,
        shuffle=True,
        seed=config.data.seed,
        drop_remainder=True,
        repeat=None,
    )
    options = InputOptions(balance_rows=True)
    return iter(strategy.experimental_distribute_dataset(source, options))
