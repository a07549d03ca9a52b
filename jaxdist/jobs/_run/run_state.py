"""The state of a run that its checkpoints save."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxdist._checkpoints import Restored, put_into, to_plain
from jaxdist._strategies import Strategy
from jaxdist._values import is_sharded
from jaxdist.data import DistributedIterator
from jaxdist.jobs._config.changes import Changed, find_changed_entries
from jaxdist.jobs._run.metrics import History
from jaxdist.jobs._tables import find_tables


@dataclasses.dataclass
class RunState:
    """A model, its optimizer, the position in the data, and the history.

    Attributes:
        model: A Flax NNX module.
        optimizer: Its optimizer.
        data: The iterator of batches.
        history: Losses and evaluations.
    """

    model: Any
    optimizer: Any
    data: DistributedIterator
    history: History = dataclasses.field(default_factory=History)

    @property
    def _tables(self) -> dict[str, Any]:
        return {name: table.variable for name, table in find_tables(self.model).items()}

    @property
    def remote_tables(self) -> dict[str, Any]:
        """The tables that are on servers, which `TableFiles` saves."""
        return {n: x for n, x in self._tables.items() if hasattr(x, "read_rows")}

    @property
    def modules(self) -> dict[str, Any]:
        """The objects that a checkpoint saves."""
        tables = {n: x for n, x in self._tables.items() if not hasattr(x, "read_rows")}
        found = {"model": self.model, "optimizer": self.optimizer}
        return {**found, "tables": tables} if tables else found

    def notes(self, identity: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return the notes of a checkpoint."""
        return {
            "config": dataclasses.asdict(config),
            "position": self.data.get_state(),
            "data": identity,
            "history": dataclasses.asdict(self.history),
        }

    def notes_after(
        self,
        step: int,
        position: Any,
        pending: Sequence[Any],
        identity: Mapping[str, Any],
        config: Any,
    ) -> dict[str, Any]:
        """Return the notes of a checkpoint of an earlier step.

        Args:
            step: The step.
            position: The state of the iterator after it.
            pending: The losses that are not yet in the history, as arrays.
            identity: As for `notes`.
            config: As for `notes`.
        """
        losses = self.history.losses
        missing = pending[: max(0, step - len(losses))]
        history = dataclasses.replace(
            self.history,
            losses=[*losses[:step], *(float(x) for x in jax.device_get(missing))],
            evaluations=[e for e in self.history.evaluations if e["step"] <= step],
        )
        return {
            "config": dataclasses.asdict(config),
            "position": position,
            "data": identity,
            "history": dataclasses.asdict(history),
        }

    def make_restore_target(self, strategy: Strategy) -> dict[str, Any]:
        """Return what to restore: arrays on the strategy's mesh as placed, others replicated."""

        def choose_layout(leaf: Any) -> Any:
            if is_sharded(leaf) or getattr(leaf.sharding, "mesh", None) == strategy.mesh:
                return leaf
            # For instance, a counter that NNX made on the default device.
            whole = strategy.replicated_sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

        return jax.tree.map(choose_layout, to_plain(self.modules), is_leaf=is_sharded)

    def load(self, restored: Restored) -> None:
        """Load a restored checkpoint into the model, the optimizer, the data and the history."""
        put_into(self.modules, restored.state)
        self.data.set_state(restored.notes["position"])
        self.history = History(**restored.notes["history"])

    def note_changes(
        self, restored: Restored, changes: Sequence[Changed], config: Any
    ) -> Iterator[str]:
        """Add changed entries to the history, and yield a line about each.

        `training.steps` may change freely. It counts as a change only if the learning rate follows
        a schedule over the steps.
        """
        saved = restored.notes.get("config")
        if saved is None:
            yield "the checkpoint does not say with which values it was trained"
            return
        steps = [c for c in find_changed_entries(saved, config) if c.name == "training.steps"]
        # A cosine schedule depends on the total number of steps; a constant one does not.
        curve = steps if config.optimizer.schedule != "constant" else []
        for change in (*changes, *curve):
            entry = {"after_step": restored.step, "entry": change.name}
            self.history.changes.append({**entry, "before": change.before, "after": change.after})
            what = (
                " (the learning rate follows a curve over all of them)" if change in curve else ""
            )
            yield (f"{change.name} is {change.after} from here on, and was {change.before}{what}")
