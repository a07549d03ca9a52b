"""The configuration of the digits task."""

import dataclasses
from typing import Literal

from jaxdist.jobs._config.schema import NOT_EMPTY, Change, JobConfig, Within, entry


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """The devices of the replicas."""

    devices: Literal["auto"] | tuple[str, ...] = entry("auto", length=NOT_EMPTY, change=Change.FREE)
    virtual_cpu_devices: int = entry(8, within=Within(1, 1024), change=Change.FREE)
    deterministic: bool | int = entry(False)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The channels of each convolution, and the units of the layer before the last."""

    # Each convolution is followed by 2x2 pooling, and 8x8 images can be halved three times.
    channels: tuple[int, ...] = entry(
        (16, 32), within=Within(1, 4096), length=Within(1, 3), change=Change.NEVER
    )
    hidden: int = entry(64, within=Within(1, 65536), change=Change.NEVER)


@dataclasses.dataclass(frozen=True)
class DigitsConfig(JobConfig):
    """The sections of `configs/digits_mirrored.toml`."""

    task: Literal["digits"] = "digits"
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
