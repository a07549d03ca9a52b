"""A run of a job with parameter servers: workers that are not in step."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxdist._parameter_server import (
    ClusterCoordinator,
    ParameterServerStrategy,
    RemoteValue,
)
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._run.progress import count_parameters
from jaxdist.jobs._run.run import Run

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
            f"{self._servers} server(s), {self._workers} worker(s) that are not in step, "
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

    def _get_losses(self, pending: Sequence[Any]) -> list[float]:
        return [float(loss.fetch()) for loss in pending]

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
