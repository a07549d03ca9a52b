"""The job of the digits task, without its data."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist._validate import as_integer
from jaxdist.jobs._config.checks import MOST_ROWS, check_rules
from jaxdist.jobs._configured_job import ConfiguredJob
from jaxdist.jobs.digits._recipe import IMAGE_SHAPE, DigitsRecipe

# From the rules of a job to `optimizer.update` of the configuration.
_UPDATES: dict[str, Literal["replicated", "sharded", "compressed"]] = {
    "replicated": "replicated",
    "sharded_update": "sharded",
    "compressed": "compressed",
}


@dataclasses.dataclass(frozen=True)
class DigitsJob(ConfiguredJob):
    """The job of `configs/digits_mirrored.toml`, for plans.

    Example:
        >>> from jaxdist.jobs import DigitsConfig, DigitsJob, LoadedConfig
        >>> job = DigitsJob(LoadedConfig(DigitsConfig(), {}))
        >>> job.rows_per_replica, job.rules
        (8, ('replicated', 'sharded_update'))
    """

    @property
    def name(self) -> str:
        """The name of the task."""
        return "digits"

    @property
    def num_replicas(self) -> int:
        """The number of devices: each has one replica."""
        asked = self.loaded.values.strategy
        listed = asked.devices
        return asked.virtual_cpu_devices if listed == "auto" else len(listed)

    @property
    def logical_devices(self) -> int | str:
        """1, since the net is small."""
        return 1

    @property
    def rules(self) -> tuple[str, ...]:
        """The kinds of update, the configured one first."""
        update = self.loaded.values.optimizer.update
        own = next(name for name, value in _UPDATES.items() if value == update)
        others = [name for name in ("replicated", "sharded_update") if name != own]
        return (own, *others)

    def recipe(self, rules: str) -> DigitsRecipe:
        """Return the configured recipe with the update of `rules`."""
        check_rules("DigitsJob.recipe", rules, tuple(_UPDATES))
        config = self.loaded.values
        optimizer = dataclasses.replace(config.optimizer, update=_UPDATES[rules])
        return DigitsRecipe(dataclasses.replace(config, optimizer=optimizer))

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of images and labels."""
        rows = as_integer("DigitsJob.batch", "rows", rows, least=1, most=MOST_ROWS)
        return {
            "image": jax.ShapeDtypeStruct((rows, *IMAGE_SHAPE), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
