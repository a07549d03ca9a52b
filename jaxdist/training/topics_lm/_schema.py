"""The configuration of the byte-level language model."""

import dataclasses
from typing import Literal

from jaxdist.training._schema import (
    COUNT,
    FRACTION,
    NOT_EMPTY,
    POSITIVE,
    SEED,
    BatchConfig,
    CheckpointConfig,
    OptimizerConfig,
    OutputConfig,
    TrainingConfig,
    Within,
    entry,
)

_RUN = "runs/topics_lm_data_parallel"


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """Which devices, how many of them are one replica, and how the model lies on them."""

    devices: Literal["auto"] | tuple[str, ...] = entry("auto", length=NOT_EMPTY)
    virtual_slice: str = entry("v5e:2x4", length=NOT_EMPTY)
    logical_devices: int | str = entry(1, within=Within(1, 2**20), length=NOT_EMPTY)
    partition: Literal["replicated", "tensor_parallel", "fsdp", "fsdp_tensor_parallel"] = entry(
        "replicated"
    )
    whole_below: int = entry(4096, within=Within(0))


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

    layers: int = entry(2, within=Within(1, 1024))
    width: int = entry(96, within=COUNT)
    heads: int = entry(4, within=COUNT)
    hidden: int = entry(384, within=COUNT)
    dropout: float = entry(0.0, within=Within(0, 0.95))
    dtype: Literal["float32", "bfloat16"] = entry("float32")
    remat: Literal["none", "parameters", "layers"] = entry("none")


@dataclasses.dataclass(frozen=True)
class TopicsOptimizerConfig(OptimizerConfig):
    """AdamW as it suits this model."""

    learning_rate: float = entry(5e-3, within=POSITIVE)
    warmup_steps: int = entry(50, within=Within(0, 2**31 - 1))
    weight_decay: float = entry(0.1, within=Within(0))
    clip_norm: float = entry(1.0, within=Within(0))


@dataclasses.dataclass(frozen=True)
class TopicsTrainingConfig(TrainingConfig):
    """How long this model takes."""

    steps: int = entry(600, within=COUNT)
    log_every: int = entry(50, within=COUNT)
    evaluate_every: int = entry(200, within=COUNT)
    donate: bool = entry(True)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The text that is generated at the end; 0 bytes is none."""

    prompt: str = entry("The ", length=NOT_EMPTY)
    bytes: int = entry(400, within=Within(0, 2**20))
    temperature: float = entry(0.7, within=Within(0))
    seed: int = entry(0, within=SEED)


@dataclasses.dataclass(frozen=True)
class TopicsCheckpointConfig(CheckpointConfig):
    """Checkpoints in a directory of this task."""

    directory: str = entry(f"{_RUN}/checkpoints", length=NOT_EMPTY)
    every: int = entry(200, within=COUNT)
    keep: int = entry(2, within=COUNT)


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
    optimizer: TopicsOptimizerConfig = dataclasses.field(default_factory=TopicsOptimizerConfig)
    training: TopicsTrainingConfig = dataclasses.field(default_factory=TopicsTrainingConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    checkpoint: TopicsCheckpointConfig = dataclasses.field(default_factory=TopicsCheckpointConfig)
    output: TopicsOutputConfig = dataclasses.field(default_factory=TopicsOutputConfig)
