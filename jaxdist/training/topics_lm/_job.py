"""The language model's training without its data, to be planned."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import partition
from jaxdist.program import RunOptions
from jaxdist.strategies import Strategy
from jaxdist.training._config import LoadedConfig
from jaxdist.training._job import JobStep
from jaxdist.training._optimizer import make_optimizer
from jaxdist.training.topics_lm._model import Transformer
from jaxdist.training.topics_lm._partition import NAMES, optimizer_for, rules_of
from jaxdist.training.topics_lm._schema import TopicsConfig
from jaxdist.training.topics_lm._steps import train_step
from jaxdist.training.topics_lm._strategy import num_cpu_devices, num_logical
from jaxdist.values import PerReplica

# Rules of a job that say how the optimizer updates, and `optimizer.update` of the configuration.
_Update = Literal["replicated", "sharded", "compressed"]
_UPDATES: dict[str, _Update] = {"sharded_update": "sharded", "compressed": "compressed"}


@dataclasses.dataclass(frozen=True)
class TopicsJob:
    """The job of `configs/topics_lm_*.toml`, to be planned.

    Example:
        >>> from jaxdist.training import LoadedConfig
        >>> job = TopicsJob(LoadedConfig(TopicsConfig(), {}))
        >>> job.rows_per_replica, job.rules[0]
        (4, 'replicated')
    """

    loaded: LoadedConfig[TopicsConfig]

    @property
    def name(self) -> str:
        """What it trains."""
        return "topics_lm"

    @property
    def rows_per_replica(self) -> int:
        """Its batch over the replicas that it has without accelerators."""
        config = self.loaded.values
        listed = config.strategy.devices
        devices = num_cpu_devices(config) if listed == "auto" else len(listed)
        return max(1, config.data.batch_size * num_logical(config) // devices)

    @property
    def logical_devices(self) -> int | str:
        """As configured."""
        return self.loaded.values.strategy.logical_devices

    @property
    def rules(self) -> tuple[str, ...]:
        """The configured partition or update first."""
        config = self.loaded.values
        own: str = config.strategy.partition
        if config.optimizer.update != "replicated":
            own = next(n for n, update in _UPDATES.items() if update == config.optimizer.update)
        every = ("replicated", "sharded_update", *NAMES[1:])
        return (own, *(name for name in every if name != own))

    def step(self, strategy: Strategy, rows: int, rules: str) -> JobStep:
        """The model, its optimizer and a batch as shapes."""
        config = self.loaded.values
        update = _UPDATES.get(rules, "replicated")
        optimizer = optimizer_for(rules, dataclasses.replace(config.optimizer, update=update))

        def made() -> tuple[Transformer, "nnx.Optimizer[Transformer]"]:
            model = Transformer(config.model, rngs=nnx.Rngs(config.training.seed))
            return model, make_optimizer(model, optimizer, num_steps=config.training.steps)

        with strategy.scope():
            model, state = nnx.eval_shape(made)
        if rules not in _UPDATES:
            chosen = rules_of(rules, config.strategy.whole_below)
            partition.place(strategy, (model, state), chosen)
        shape = (rows * strategy.num_replicas_in_sync, config.data.sequence_length + 1)
        batch = {"tokens": PerReplica.of_global(jax.ShapeDtypeStruct(shape, jnp.uint8))}
        donated = (0, 1) if config.training.donate else ()
        return JobStep(train_step, (model, state, batch), RunOptions(donate_argnums=donated))
