"""The schema of configurations: dataclasses of the sections that all tasks share.

`load_config` reads names, types, defaults and ranges from these classes. No other list of them
exists.
"""

import dataclasses
import enum
import math
from typing import Any, Literal, get_type_hints

from jaxdist._validate import check_instance, show
from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Within:
    """A range for a number, for each item of a list, or for the length of a text.

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
        """Return the rule in words if `value` breaks it, else None."""
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
    """Whether a run may resume from a checkpoint with another value of an entry."""

    FREE = "free"  # the trained parameters do not depend on it
    KNOWINGLY = "knowingly"  # from then on, training gives other parameters
    NEVER = "never"  # shapes or the held-out examples depend on it


def entry(
    default: Any,
    *,
    within: Within | None = None,
    length: Within | None = None,
    change: Change = Change.KNOWINGLY,
    only_if: tuple[str, Any] | None = None,
) -> Any:
    """Return the field of an entry, with its default and its rules.

    Args:
        default: The default.
        within: The range of its values.
        length: The range of its length.
        change: Whether a run may resume with another value.
        only_if: The name and a value of another entry. With other values of that entry, this one
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
    """The global batch, and the held-out examples."""

    batch_size: int = entry(64, within=COUNT)
    test_fraction: float = entry(0.2, within=FRACTION, change=Change.NEVER)
    seed: int = entry(0, within=SEED, change=Change.NEVER)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and the schedule of its learning rate."""

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
    """The number of steps, and how often to log and evaluate."""

    steps: int = entry(400, within=COUNT, change=Change.FREE)
    log_every: int = entry(20, within=COUNT, change=Change.FREE)
    evaluate_every: int = entry(100, within=COUNT, change=Change.FREE)
    seed: int = entry(0, within=SEED)
    donate: bool = entry(False, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often to save, and whether to resume from an existing checkpoint."""

    directory: str = entry("runs/digits_mirrored/checkpoints", length=NOT_EMPTY, change=Change.FREE)
    every: int = entry(100, within=COUNT, change=Change.FREE)
    keep: int = entry(3, within=COUNT, change=Change.FREE)
    resume: bool = entry(True, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """The files at the end of a run. With an empty `picture`, none is drawn."""

    directory: str = entry("runs/digits_mirrored", length=NOT_EMPTY, change=Change.FREE)
    metrics: str = entry("metrics.json", length=NOT_EMPTY, change=Change.FREE)
    picture: str = entry("learning_curve.png", change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The sections of every task. A task adds its own sections and defaults."""

    task: str = ""
    data: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    output: OutputConfig = dataclasses.field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        caller = f"training.{type(self).__name__}"
        # Without this check, a dict for a section would fail later, with an unclear message.
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
