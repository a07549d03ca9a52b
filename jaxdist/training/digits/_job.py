"""The main job without its data."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.program import RunOptions
from jaxdist.strategies import Strategy
from jaxdist.training._config import LoadedConfig
from jaxdist.training._job import JobStep
from jaxdist.training._optimizer import make_optimizer
from jaxdist.training.digits._schema import DigitsConfig
from jaxdist.training.digits._task import IMAGE_SHAPE, DigitsNet, train_step
from jaxdist.values import PerReplica

# Rules of a job, and `optimizer.update` of the configuration.
_Update = Literal["replicated", "sharded", "compressed"]
_UPDATES: dict[str, _Update] = {
    "replicated": "replicated",
    "sharded_update": "sharded",
    "compressed": "compressed",
}


@dataclasses.dataclass(frozen=True)
class DigitsJob:
    """The job of `configs/digits_mirrored.toml`, to be planned.

    Example:
        >>> from jaxdist.training import DigitsConfig, DigitsJob, LoadedConfig
        >>> job = DigitsJob(LoadedConfig(DigitsConfig(), {}))
        >>> job.rows_per_replica, job.rules
        (8, ('replicated', 'sharded_update'))
    """

    loaded: LoadedConfig[DigitsConfig]

    @property
    def name(self) -> str:
        """What it trains."""
        return "digits"

    @property
    def rows_per_replica(self) -> int:
        """Its batch over the replicas that it has without accelerators."""
        config = self.loaded.values
        listed = config.strategy.devices
        count = config.strategy.virtual_cpu_devices if listed == "auto" else len(listed)
        return max(1, config.data.batch_size // count)

    @property
    def logical_devices(self) -> int | str:
        """One: the net is small."""
        return 1

    @property
    def rules(self) -> tuple[str, ...]:
        """The configured update first."""
        update = self.loaded.values.optimizer.update
        own = next(name for name, value in _UPDATES.items() if value == update)
        others = [name for name in ("replicated", "sharded_update") if name != own]
        return (own, *others)

    def step(self, strategy: Strategy, rows: int, rules: str) -> JobStep:
        """The net, its optimizer and a batch as shapes."""
        config = self.loaded.values
        optimizer = dataclasses.replace(config.optimizer, update=_UPDATES[rules])

        def made() -> tuple[DigitsNet, "nnx.Optimizer[DigitsNet]"]:
            net = DigitsNet(config.model, rngs=nnx.Rngs(config.training.seed))
            return net, make_optimizer(net, optimizer, num_steps=config.training.steps)

        with strategy.scope():
            net, state = nnx.eval_shape(made)
        total = rows * strategy.num_replicas_in_sync
        batch = {
            "image": _rows((total, *IMAGE_SHAPE), jnp.float32),
            "label": _rows((total,), jnp.int32),
        }
        donated = (0, 1) if config.training.donate else ()
        return JobStep(train_step, (net, state, batch), RunOptions(donate_argnums=donated))


def _rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> PerReplica:
    return PerReplica.of_global(jax.ShapeDtypeStruct(shape, dtype))
