"""The configuration of the byte-level language model."""

import dataclasses
from typing import Literal

from jaxdist.training._schema import (
    COUNT,
    FRACTION,
    NOT_EMPTY,
    SEED,
    BatchConfig,
    CheckpointConfig,
    OptimizerConfig,
    OutputConfig,
    TrainingConfig,
    Within,
    entry,
)

_RUN = "runs/topics_lm"


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """Which devices, how many of them are one replica, and how the model lies on them."""

    devices: Literal["auto"] | tuple[str, ...] = entry("auto", length=NOT_EMPTY)
    virtual_slice: str = entry("v5e:2x4", length=NOT_EMPTY)
    logical_devices: int | str = entry(1, within=Within(1, 2**20), length=NOT_EMPTY)


@dataclasses.dataclass(frozen=True)
class DataConfig(BatchConfig):
    """Windows of bytes: how many at once, how long, and how far apart they start."""

    batch_size: int = entry(32, within=COUNT)
    test_fraction: float = entry(0.1, within=FRACTION)
    sequence_length: int = entry(128, within=Within(1, 2**20))
    stride: int = entry(16, within=COUNT)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    layers: int = entry(3, within=Within(1, 1024))
    width: int = entry(128, within=COUNT)
    heads: int = entry(4, within=COUNT)
    hidden: int = entry(512, within=COUNT)
    dropout: float = entry(0.0, within=Within(0, 0.95))
    dtype: Literal["float32", "bfloat16"] = entry("float32")
    remat: bool = entry(False)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The text that is generated at the end; 0 bytes is none."""

    prompt: str = entry("The ", length=NOT_EMPTY)
    bytes: int = entry(300, within=Within(0, 2**20))
    temperature: float = entry(0.7, within=Within(0))
    seed: int = entry(0, within=SEED)


@dataclasses.dataclass(frozen=True)
class TopicsCheckpointConfig(CheckpointConfig):
    """Checkpoints in a directory of this task."""

    directory: str = entry(f"{_RUN}/checkpoints", length=NOT_EMPTY)


@dataclasses.dataclass(frozen=True)
class TopicsOutputConfig(OutputConfig):
    """Files in a directory of this task."""

    directory: str = entry(_RUN, length=NOT_EMPTY)


@dataclasses.dataclass(frozen=True)
class TopicsConfig:
    """The sections of `configs/topics_lm_*.toml`."""

    task: Literal["topics_lm"] = "topics_lm"
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=TopicsCheckpointConfig)
    output: OutputConfig = dataclasses.field(default_factory=TopicsOutputConfig)
