"""What a run has learned so far: what its checkpoints hold."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxdist._checkpoints import Restored
from jaxdist._strategies import Strategy
from jaxdist._values import is_sharded
from jaxdist.data import DistributedIterator
from jaxdist.jobs._config.changes import Changed, changed_entries
from jaxdist.jobs._config.load import as_dict
from jaxdist.jobs._run.metrics import History


@dataclasses.dataclass
class RunState:
    """A model and its optimizer, how far the data was read, and what was measured.

    Attributes:
        model: A Flax NNX module.
        optimizer: Its optimizer.
        data: Where the next batch comes from.
        history: Losses and evaluations.
    """

    model: Any
    optimizer: Any
    data: DistributedIterator
    history: History = dataclasses.field(default_factory=History)

    def arrays(self) -> dict[str, Any]:
        """What is saved of the modules."""
        modules = {"model": self.model, "optimizer": self.optimizer}
        return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}

    def notes(self, identity: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """What is saved beside them."""
        return {
            "config": as_dict(config),
            "position": self.data.get_state(),
            "data": identity,
            "history": dataclasses.asdict(self.history),
        }

    def make_restore_target(self, strategy: Strategy) -> dict[str, Any]:
        """How arrays are to be restored: as they were placed, and else on every device."""

        def choose_layout(leaf: Any) -> Any:
            if is_sharded(leaf) or getattr(leaf.sharding, "mesh", None) == strategy.mesh:
                return leaf
            whole = strategy.replicated_sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

        found: dict[str, Any] = jax.tree.map(choose_layout, self.arrays(), is_leaf=is_sharded)
        return found

    def load(self, restored: Restored) -> None:
        """Take over what a checkpoint held."""
        _load(self.model, restored.state["model"])
        _load(self.optimizer, restored.state["optimizer"])
        self.data.set_state(restored.notes["position"])
        self.history = History(**restored.notes["history"])

    def note_changes(
        self, restored: Restored, changes: Sequence[Changed], config: Any
    ) -> Iterator[str]:
        """Write down which values hold from here on, and say so.

        Steps may grow at any time; where the learning rate follows a curve over them, that is a
        change as well.
        """
        saved = restored.notes.get("config")
        if saved is None:
            yield "the checkpoint does not say with which values it was trained"
            return
        steps = [c for c in changed_entries(saved, config) if c.name == "training.steps"]
        curve = steps if config.optimizer.schedule != "constant" else []
        for change in (*changes, *curve):
            entry = {"after_step": restored.step, "entry": change.name}
            self.history.changes.append({**entry, "before": change.before, "after": change.after})
            what = (
                " (the learning rate follows a curve over all of them)" if change in curve else ""
            )
            yield (f"{change.name} is {change.after} from here on, and was {change.before}{what}")


def _load(module: nnx.Pytree, values: dict[str, Any]) -> None:
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(module, state)
