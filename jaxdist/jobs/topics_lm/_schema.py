"""The configuration of the byte-level language model."""

import dataclasses
import functools
from typing import Literal

from jaxdist.jobs._config.schema import (
    COUNT,
    NOT_EMPTY,
    SEED,
    BatchConfig,
    Change,
    CheckpointConfig,
    JobConfig,
    OptimizerConfig,
    OutputConfig,
    TrainingConfig,
    Within,
    entry,
)
from jaxdist.jobs.topics_lm._partition import Partition

_RUN = "runs/topics_lm_data_parallel"


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """The devices, the devices of a replica, and the placement of the model on them."""

    devices: Literal["auto"] | tuple[str, ...] = entry("auto", length=NOT_EMPTY, change=Change.FREE)
    virtual_slice: str = entry("v5e:2x4", length=NOT_EMPTY, change=Change.FREE)
    logical_devices: int | str = entry(
        1, within=Within(1, 2**20), length=NOT_EMPTY, change=Change.FREE
    )
    slices: int = entry(1, within=Within(1, 2**20), change=Change.FREE)
    partition: Partition = entry("replicated", change=Change.FREE)
    whole_below: int = entry(4096, within=Within(0), change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class DataConfig(BatchConfig):
    """Windows of bytes: the batch size, their length, and the distance of their starts."""

    sequence_length: int = entry(128, within=Within(1, 2**20), change=Change.NEVER)
    stride: int = entry(16, within=COUNT, change=Change.NEVER)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder-only transformer."""

    layers: int = entry(2, within=Within(1, 1024), change=Change.NEVER)
    width: int = entry(96, within=COUNT, change=Change.NEVER)
    heads: int = entry(4, within=COUNT, change=Change.NEVER)
    hidden: int = entry(384, within=COUNT, change=Change.NEVER)
    dropout: float = entry(0.0, within=Within(0, 0.95))
    dtype: Literal["float32", "bfloat16"] = entry("float32")
    remat: Literal["none", "parameters", "layers"] = entry("none", change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The text that is generated at the end. With 0 bytes, none is generated."""

    prompt: str = entry("The ", length=NOT_EMPTY, change=Change.FREE)
    bytes: int = entry(400, within=Within(0, 2**20), change=Change.FREE)
    temperature: float = entry(0.7, within=Within(0), change=Change.FREE)
    seed: int = entry(0, within=SEED, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class TopicsConfig(JobConfig):
    """The sections of `configs/topics_lm_*.toml`."""

    task: Literal["topics_lm"] = "topics_lm"
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    data: DataConfig = dataclasses.field(
        default_factory=functools.partial(DataConfig, batch_size=32, test_fraction=0.1)
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=functools.partial(
            OptimizerConfig, learning_rate=5e-3, warmup_steps=50, weight_decay=0.1, clip_norm=1.0
        )
    )
    training: TrainingConfig = dataclasses.field(
        default_factory=functools.partial(
            TrainingConfig, steps=600, log_every=50, evaluate_every=200, donate=True
        )
    )
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(
        default_factory=functools.partial(
            CheckpointConfig, directory=f"{_RUN}/checkpoints", every=200, keep=2
        )
    )
    output: OutputConfig = dataclasses.field(
        default_factory=functools.partial(OutputConfig, directory=_RUN)
    )
