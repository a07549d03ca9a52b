"""The job of the language model, without its data."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.jobs._configured_job import ConfiguredJob
from jaxdist.jobs.topics_lm._partition import NAMES
from jaxdist.jobs.topics_lm._recipe import TopicsRecipe
from jaxdist.jobs.topics_lm._strategy import count_logical_devices, num_cpu_devices

# From the rules of a job that are kinds of update to `optimizer.update` of the configuration.
_UPDATES: dict[str, Literal["sharded", "compressed"]] = {
    "sharded_update": "sharded",
    "compressed": "compressed",
}


@dataclasses.dataclass(frozen=True)
class TopicsJob(ConfiguredJob):
    """The job of `configs/topics_lm_*.toml`, for plans.

    Example:
        >>> from jaxdist.jobs import LoadedConfig
        >>> from jaxdist.jobs.topics_lm import TopicsConfig
        >>> job = TopicsJob(LoadedConfig(TopicsConfig(), {}))
        >>> job.rows_per_replica, job.rules[0]
        (4, 'replicated')
    """

    @property
    def name(self) -> str:
        """The name of the task."""
        return "topics_lm"

    @property
    def num_replicas(self) -> int:
        """The number of devices, divided by the devices of a replica."""
        config = self.loaded.values
        listed = config.strategy.devices
        devices = num_cpu_devices(config) if listed == "auto" else len(listed)
        return max(1, devices // count_logical_devices(config))

    @property
    def logical_devices(self) -> int | str:
        """The configured logical devices."""
        asked: int | str = self.loaded.values.strategy.logical_devices
        return asked

    @property
    def rules(self) -> tuple[str, ...]:
        """All rules. The first is the configured partition, or the update if that is replicated."""
        config = self.loaded.values
        own: str = config.strategy.partition
        if own == "replicated":
            named = (n for n, update in _UPDATES.items() if update == config.optimizer.update)
            own = next(named, own)
        every = ("replicated", "sharded_update", *NAMES[1:])
        return (own, *(name for name in every if name != own))

    def recipe(self, rules: str) -> TopicsRecipe:
        """Return the configured recipe, with the partition and update of `rules`."""
        config = self.loaded.values
        partition = "replicated" if rules in _UPDATES else rules
        update = _UPDATES.get(rules, "replicated")
        changed = dataclasses.replace(
            config,
            strategy=dataclasses.replace(config.strategy, partition=partition),
            optimizer=dataclasses.replace(config.optimizer, update=update),
        )
        return TopicsRecipe(changed)

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of a batch of windows."""
        shape = (rows, self.loaded.values.data.sequence_length + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.uint8)}
