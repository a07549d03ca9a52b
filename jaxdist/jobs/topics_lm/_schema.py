"""The configuration of the byte-level language model."""

import dataclasses
import sys
from typing import Annotated, Literal

from msgspec import Meta

from jaxdist.jobs import (
    BatchConfig,
    CheckpointConfig,
    JobConfig,
    OptimizerConfig,
    OutputConfig,
    StrategyConfig,
    TrainingConfig,
    entry,
    section,
)
from jaxdist.jobs.topics_lm._text import VOCABULARY

_RUN = "runs/topics_lm_data_parallel"
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


@dataclasses.dataclass(frozen=True)
class DataConfig(BatchConfig):
    """Windows of bytes: the batch size, their length, and the distance of their starts."""

    sequence_length: Annotated[int, Meta(ge=1, le=2**20)] = entry(128, change="never")
    stride: Count = entry(16, change="never")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder-only transformer."""

    layers: Annotated[int, Meta(ge=1, le=1024)] = entry(2, change="never")
    width: Count = entry(96, change="never")
    heads: Count = entry(4, change="never")
    head_dim: Annotated[int, Meta(ge=0, le=2**31 - 1)] = entry(0, change="never")
    hidden: Count = entry(384, change="never")
    mlp: Literal["gelu", "gated"] = entry("gelu", change="never")
    experts: Annotated[int, Meta(ge=0, le=2**20)] = entry(0, change="never")
    top_k: Count = entry(2)
    capacity: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = entry(1.25)
    balance: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = entry(0.01)
    vocabulary: Annotated[int, Meta(ge=VOCABULARY, le=2**31 - 1)] = entry(
        VOCABULARY, change="never"
    )
    output: Literal["own", "shared"] = entry("own", change="never")
    attention: Literal["plain", "chunked", "flash", "splash"] = entry("plain", change="free")
    attention_chunk: Count = entry(512, change="free")
    scan_layers: bool = entry(False, change="never")
    sums_between_slices: Literal["float32", "bfloat16"] = entry(
        "float32", only_if=("model.scan_layers", True)
    )
    split_residual: bool = entry(False, change="free")
    dropout: Annotated[float, Meta(ge=0, le=0.95)] = entry(0.0)
    dtype: Literal["float32", "bfloat16"] = entry("float32")
    remat: Literal["none", "parameters", "products", "layers"] = entry("none", change="free")

    @property
    def dims_of_a_head(self) -> int:
        """The dims of a head: `head_dim`, or an equal share of the width."""
        return self.head_dim or self.width // self.heads


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The text that is generated at the end. With 0 bytes, none is generated."""

    prompt: Annotated[str, Meta(min_length=1)] = entry("The ", change="free")
    bytes: Annotated[int, Meta(ge=0, le=2**20)] = entry(400, change="free")
    temperature: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = entry(0.7, change="free")
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = entry(0, change="free")


@dataclasses.dataclass(frozen=True)
class TopicsConfig(JobConfig):
    """The sections of `configs/topics_lm_*.toml`."""

    task: Literal["topics_lm"] = "topics_lm"
    strategy: StrategyConfig = section(StrategyConfig, virtual_devices="v5e:2x4")
    data: DataConfig = section(DataConfig, batch_size=32, test_fraction=0.1)
    model: ModelConfig = section(ModelConfig)
    optimizer: OptimizerConfig = section(
        OptimizerConfig, learning_rate=5e-3, warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    )
    training: TrainingConfig = section(
        TrainingConfig, steps=600, log_every=50, evaluate_every=200, donate=True
    )
    generate: GenerateConfig = section(GenerateConfig)
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, directory=f"{_RUN}/checkpoints", every=200, keep=2
    )
    output: OutputConfig = section(OutputConfig, directory=_RUN)
