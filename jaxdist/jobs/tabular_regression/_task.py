"""The regression as a task: its table, the missing values, and how to describe its results."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from msgspec import Meta

from jaxdist import Strategy
from jaxdist.errors import ConfigError
from jaxdist.jobs import (
    BatchConfig,
    CheckpointConfig,
    Curve,
    Data,
    JobConfig,
    OutputConfig,
    Task,
    entry,
    section,
    split_rows,
)
from jaxdist.jobs.tabular_regression._model import (
    ModelConfig,
    Regressor,
    evaluation_step,
    train_step,
)
from jaxdist.training import WEIGHT

NUM_FEATURES = 8
_RUN = "runs/tabular_regression"


@dataclasses.dataclass(frozen=True)
class DataConfig(BatchConfig):
    """The size of the table, and the fraction of its numbers that are missing."""

    rows: Annotated[int, Meta(ge=10, le=2**20)] = entry(2000, change="never")
    missing: Annotated[float, Meta(ge=0, le=0.9)] = entry(0.15, change="never")


@dataclasses.dataclass(frozen=True)
class TableConfig(JobConfig):
    """The sections of `configs/tabular_regression.toml`."""

    task: Literal["tabular_regression"] = "tabular_regression"
    data: DataConfig = section(DataConfig)
    model: ModelConfig = section(ModelConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig, directory=f"{_RUN}/checkpoints")
    output: OutputConfig = section(OutputConfig, directory=_RUN)


def make_table(rows: int, missing: float) -> np.ndarray:
    """Make the table `[rows, 9]`: features and, in the last column, the target; NaN is missing.

    Three hidden causes determine all columns, so a known feature tells something about a missing
    one.

    Example:
        >>> make_table(1000, missing=0.25).shape
        (1000, 9)
    """
    rng = np.random.default_rng(0)
    causes = rng.normal(size=(rows, 3))
    features = causes @ rng.normal(size=(3, NUM_FEATURES))
    features += 0.3 * rng.normal(size=features.shape)
    target = causes[:, 0] + np.sin(2 * causes[:, 1]) + causes[:, 0] * causes[:, 2]
    target = 100 + 10 * target + rng.normal(size=rows)
    table = np.column_stack([features, target])
    table[rng.random(table.shape) < missing] = np.nan
    return table


@dataclasses.dataclass(frozen=True)
class Scale:
    """The mean and the standard deviation of each column, over known numbers of training rows.

    A column without a known number has the mean 0 and the deviation 1.
    """

    mean: np.ndarray  # [column]
    deviation: np.ndarray  # [column]

    @classmethod
    def of(cls, table: np.ndarray) -> "Scale":
        """Compute the scale of a table `[n, column]`."""
        known = ~np.isnan(table)
        count = np.maximum(known.sum(0), 1)
        mean = np.where(known, table, 0).sum(0) / count
        deviation = np.sqrt(np.where(known, (table - mean) ** 2, 0).sum(0) / count)
        return cls(mean, np.where(deviation > 0, deviation, 1.0))

    def apply(self, table: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples of a table: the last column is the target.

        Features are scaled. A missing one gets the mean, which is 0 after scaling. After the
        features come flags that say which are known.

        Example:
            >>> table = np.array([[1.0, 10.0], [3.0, 20.0], [np.nan, np.nan]])
            >>> rows = Scale.of(table).apply(table)
            >>> rows["features"].tolist(), rows["is_known"].tolist()
            ([[-1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], [True, True, False])
        """
        known = ~np.isnan(table)
        scaled = np.where(known, (table - self.mean) / self.deviation, 0).astype(np.float32)
        flags = known[:, :-1].astype(np.float32)
        return {
            "features": np.concatenate([scaled[:, :-1], flags], axis=1),
            "target": scaled[:, -1],
            "is_known": known[:, -1],
        }


@final
class TableTask(Task[TableConfig]):
    """Predicts a target from 8 features, some of which are missing.

    Example:
        >>> task = TableTask(TableConfig())
        >>> task.rows_per_replica, task.batch(4)["features"].shape
        (8, (4, 16))
    """

    config_type = TableConfig
    title = "table"
    examples = "rows"
    unit = "rows"
    curve = Curve("r2", "held-out R²")
    in_words = "held-out R² {r2:.4f}, RMSE {rmse:.3f} on {rows:.0f} rows with a known target"
    headline = "R² {r2:.4f}"
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    def make_model(self, rngs: nnx.Rngs) -> Regressor:
        return Regressor(2 * NUM_FEATURES, self.config.model, rngs=rngs)

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "features": jax.ShapeDtypeStruct((rows, 2 * NUM_FEATURES), jnp.float32),
            "target": jax.ShapeDtypeStruct((rows,), jnp.float32),
            "is_known": jax.ShapeDtypeStruct((rows,), jnp.bool_),
        }

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows to train on, and the held-out rows."""
        asked = self.config.data
        table = make_table(asked.rows, asked.missing)
        parts = split_rows(table, asked.test_fraction, asked.seed)
        known = [int((~np.isnan(part[:, -1])).sum()) for part in parts]
        # A mean and a variance need two values.
        if min(known) < 2:
            raise ConfigError(
                f"The table has {known[0]} known targets to train on, and {known[1]} held out.\n\n"
                "Each part needs 2 or more.\n\n"
                "Set data.rows higher, data.missing lower, or data.test_fraction nearer to 0.5."
            )
        return parts

    @functools.cached_property
    def _scale(self) -> Scale:
        # Only of the training rows: a held-out row must not change what the model is trained on.
        return Scale.of(self._tables[0])

    def load(self) -> Data:
        train, held_out = map(self._scale.apply, self._tables)
        names = ("seed", "test_fraction", "rows", "missing")
        return Data(train, held_out, {name: getattr(self.config.data, name) for name in names})

    @functools.cached_property
    def baseline(self) -> float:
        """The held-out RMSE of a model that predicts the mean of the training targets."""
        held_out = self._tables[1][:, -1]
        return float(np.sqrt(np.nanmean((held_out - self._scale.mean[-1]) ** 2)))

    def measures(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        variance = means["square"] - means["target"] ** 2
        return {
            "loss": loss,
            "r2": 1 - loss / variance,
            "rmse": math.sqrt(loss) * float(self._scale.deviation[-1]),
            "rows": means[WEIGHT],
        }

    def finish(self, strategy: Strategy, model: nnx.Module) -> tuple[dict[str, Any], str]:
        del strategy, model
        words = f"predicting the mean of the training rows has RMSE {self.baseline:.3f}"
        return {"baseline_rmse": self.baseline}, words
