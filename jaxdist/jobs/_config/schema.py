"""The sections that configurations of all tasks share: these dataclasses are the schema.

The name of a section and of an entry, its type, its default and its range are read from here by
`load_config`; there is no other list of them.
"""

import dataclasses
import enum
import math
from typing import Any, Literal, get_type_hints

from jaxdist._validate import check_instance, show
from jaxdist.errors import ArgumentError


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


class Change(enum.Enum):
    """Whether a run may go on from a checkpoint with another value of an entry."""

    FREE = "free"  # what is learned does not depend on it
    KNOWINGLY = "knowingly"  # what is learned from there on is something else
    NEVER = "never"  # shapes depend on it, or what is held out


def entry(
    default: Any,
    *,
    within: Within | None = None,
    length: Within | None = None,
    change: Change = Change.KNOWINGLY,
    only_if: tuple[str, Any] | None = None,
) -> Any:
    """An entry of a section: its default and its rules.

    Args:
        default: Its value where none is given.
        within: Which values it may have.
        length: How long it may be.
        change: Whether a run may go on with another value.
        only_if: Another entry and the value of it that this one belongs to; with other values it
            has no effect.
    """
    metadata = {"within": within, "length": length, "change": change, "only_if": only_if}
    return dataclasses.field(default=default, metadata=metadata)


COUNT = Within(1, 2**31 - 1)
SEED = Within(0, 2**32 - 1)
POSITIVE = Within(0, math.inf, is_open=True)
FRACTION = Within(0, 1, is_open=True)
NOT_EMPTY = Within(1)
_COMPRESSED = ("optimizer.update", "compressed")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The global batch, and what is held out."""

    batch_size: int = entry(64, within=COUNT)
    test_fraction: float = entry(0.2, within=FRACTION, change=Change.NEVER)
    seed: int = entry(0, within=SEED, change=Change.NEVER)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over the steps."""

    learning_rate: float = entry(3e-3, within=POSITIVE)
    schedule: Literal["cosine", "constant"] = entry("cosine")
    warmup_steps: int = entry(20, within=Within(0, 2**31 - 1))
    weight_decay: float = entry(1e-4, within=Within(0))
    clip_norm: float = entry(0.0, within=Within(0))
    update: Literal["replicated", "sharded", "compressed"] = entry("replicated")
    compression: Literal["bf16", "int8"] = entry("int8", only_if=_COMPRESSED)
    workers: int = entry(2, within=COUNT, only_if=_COMPRESSED)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, and how often to look."""

    steps: int = entry(400, within=COUNT, change=Change.FREE)
    log_every: int = entry(20, within=COUNT, change=Change.FREE)
    evaluate_every: int = entry(100, within=COUNT, change=Change.FREE)
    seed: int = entry(0, within=SEED)
    donate: bool = entry(False, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often to save, and whether to go on from what is there."""

    directory: str = entry("runs/digits_mirrored/checkpoints", length=NOT_EMPTY, change=Change.FREE)
    every: int = entry(100, within=COUNT, change=Change.FREE)
    keep: int = entry(3, within=COUNT, change=Change.FREE)
    resume: bool = entry(True, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """What is written at the end; an empty `picture` draws none."""

    directory: str = entry("runs/digits_mirrored", length=NOT_EMPTY, change=Change.FREE)
    metrics: str = entry("metrics.json", length=NOT_EMPTY, change=Change.FREE)
    picture: str = entry("learning_curve.png", change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The sections that every task has; a task adds its own, and its own defaults."""

    task: str = ""
    data: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    output: OutputConfig = dataclasses.field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        caller = f"training.{type(self).__name__}"
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if isinstance(field.default, str):
                if field.default and not (isinstance(given, str) and given == field.default):
                    raise ArgumentError(
                        f"{caller} was given {field.name}={show(given)}.\n\n"
                        f"{field.name} is {field.default!r}.\n\nLeave {field.name} out."
                    )
                continue
            kind = hints[field.name]
            what = f"the section {kind.__name__}"
            remedy = f"Leave {field.name} out, or pass {kind.__name__}()."
            check_instance(caller, field.name, given, kind, what, remedy)
