"""The base class of jobs: the train step of a configuration, with shapes for arrays."""

import abc
import dataclasses
from typing import Any

import jax

from jaxdist._strategies import Strategy, check_strategy
from jaxdist._validate import CallerRename, as_integer, check_instance
from jaxdist._values import PerReplica
from jaxdist.jobs._config.checks import MOST_ROWS
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._job import JobStep
from jaxdist.jobs._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class ConfiguredJob(abc.ABC):
    """The base class of the jobs of all tasks. A subclass applies rules to its configuration."""

    loaded: LoadedConfig[Any]

    def __post_init__(self) -> None:
        check_instance(
            type(self).__name__,
            "loaded",
            self.loaded,
            LoadedConfig,
            "a jobs.LoadedConfig",
            "Pass jobs.load_job_config(path).",
        )

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """The number of replicas on a machine without accelerators."""

    @abc.abstractmethod
    def recipe(self, rules: str) -> Recipe:
        """Return the recipe whose state is placed by `rules`."""

    @abc.abstractmethod
    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a global batch of `rows` rows."""

    @property
    def rows_per_replica(self) -> int:
        """The configured batch size, divided by the replicas without accelerators."""
        rows: int = self.loaded.values.data.batch_size
        return max(1, rows // self.num_replicas)

    def step(self, strategy: Strategy, rows: int, rules: str) -> JobStep:
        """Return the train step, with the model, its optimizer and a batch as shapes."""
        caller = f"{type(self).__name__}.step"
        check_strategy(caller, strategy)
        rows = as_integer(caller, "rows", rows, least=1, most=MOST_ROWS)
        with CallerRename(f"{type(self).__name__}.recipe", caller):
            recipe = self.recipe(rules)
        shapes = self.batch(rows * strategy.num_replicas_in_sync)
        args = (*recipe.build(strategy, abstract=True), jax.tree.map(PerReplica.of_global, shapes))
        return JobStep(recipe.train_step, args, recipe.options)
