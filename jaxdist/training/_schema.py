"""The sections that configurations of all tasks share: these dataclasses are the schema.

The name of a section and of an entry, its type, its default and its range are read from here by
`load_config`; there is no other list of them.
"""

import dataclasses
import math
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Within:
    """A rule for a number, for each item of a list, or for the length of a text.

    Example:
        >>> Within(0, 1, is_open=True).broken_by(1.0)
        'must lie between 0 and 1, both left out'
        >>> Within(1).broken_by(1) is None
        True
    """

    low: float
    high: float = math.inf
    is_open: bool = False

    def broken_by(self, value: float) -> str | None:
        """The rule in words where `value` breaks it, None where it keeps it."""
        if not math.isfinite(value):
            return "must be finite"
        is_inside = self.low <= value <= self.high
        if is_inside and not (self.is_open and value in (self.low, self.high)):
            return None
        if math.isinf(self.high):
            return f"must be {'more than' if self.is_open else 'at least'} {self.low}"
        between = f"must lie between {self.low} and {self.high}"
        return f"{between}, both left out" if self.is_open else between


def entry(default: Any, *, within: Within | None = None, length: Within | None = None) -> Any:
    """An entry of a section: its default and its rules."""
    return dataclasses.field(default=default, metadata={"within": within, "length": length})


COUNT = Within(1, 2**31 - 1)
SEED = Within(0, 2**32 - 1)
POSITIVE = Within(0, math.inf, is_open=True)
FRACTION = Within(0, 1, is_open=True)
NOT_EMPTY = Within(1)


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The global batch, and what is held out."""

    batch_size: int = entry(64, within=COUNT)
    test_fraction: float = entry(0.2, within=FRACTION)
    seed: int = entry(0, within=SEED)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over the steps."""

    learning_rate: float = entry(3e-3, within=POSITIVE)
    schedule: Literal["cosine", "constant"] = entry("cosine")
    warmup_steps: int = entry(20, within=Within(0, 2**31 - 1))
    weight_decay: float = entry(1e-4, within=Within(0))
    clip_norm: float = entry(0.0, within=Within(0))
    update: Literal["replicated", "sharded", "compressed"] = entry("replicated")
    compression: Literal["bf16", "int8"] = entry("int8")
    workers: int = entry(2, within=COUNT)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, and how often to look."""

    steps: int = entry(400, within=COUNT)
    log_every: int = entry(20, within=COUNT)
    evaluate_every: int = entry(100, within=COUNT)
    seed: int = entry(0, within=SEED)
    donate: bool = entry(False)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often to save, and whether to go on from what is there."""

    directory: str = entry("runs/digits_mirrored/checkpoints", length=NOT_EMPTY)
    every: int = entry(100, within=COUNT)
    keep: int = entry(3, within=COUNT)
    resume: bool = entry(True)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """What is written at the end; an empty `picture` draws none."""

    directory: str = entry("runs/digits_mirrored", length=NOT_EMPTY)
    metrics: str = entry("metrics.json", length=NOT_EMPTY)
    picture: str = entry("learning_curve.png")


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The sections that every task has; a task adds its own, and its own defaults."""

    task: str = ""
    data: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    output: OutputConfig = dataclasses.field(default_factory=OutputConfig)
