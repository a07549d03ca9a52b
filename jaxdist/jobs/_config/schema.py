"""The schema of configurations: dataclasses of the sections that all tasks share.

`load_config` reads names, types, defaults and bounds from these classes. No other list of them
exists. msgspec checks the types and the bounds.
"""

import dataclasses
import enum
import functools
import sys
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from jaxdist._called import called, refuse
from jaxdist._program import CompilerOptions, as_compiler_options
from jaxdist._validate import check_instance, show
from jaxdist.errors import ArgumentError
from jaxdist.jobs._partitions import PartitionName

LARGEST = sys.float_info.max  # as the upper bound of a number, it refuses infinity only

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumDevices = Annotated[int, Meta(ge=1, le=2**20)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
PositiveOrZero = Annotated[float, Meta(ge=0, le=LARGEST)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Text = Annotated[str, Meta(min_length=1)]
# A path of the local file system; `load_config` turns file:///folder into one, and refuses buckets.
LocalPath = Annotated[str, Meta(min_length=1, title="a path")]
LocalPathOrNone = Annotated[str, Meta(title="a path")]


class Change(enum.Enum):
    """Whether a run may resume from a checkpoint with another value of an entry."""

    FREE = "free"  # the trained parameters do not depend on it
    KNOWINGLY = "knowingly"  # from then on, training gives other parameters
    NEVER = "never"  # shapes or the held-out examples depend on it


def entry(
    default: Any, *, change: Change = Change.KNOWINGLY, only_if: tuple[str, Any] | None = None
) -> Any:
    """Return the field of an entry.

    Args:
        default: The default.
        change: Whether a run may resume with another value.
        only_if: The name and a value of another entry. With other values of that entry, this one
            has no effect.
    """
    return dataclasses.field(default=default, metadata={"change": change, "only_if": only_if})


def section(kind: type[Any], **defaults: Any) -> Any:
    """Return the field of a section, with other defaults than those of its class."""
    return dataclasses.field(default_factory=functools.partial(kind, **defaults))


_COMPRESSED = ("optimizer.update", "compressed")
_ON_SERVERS = ("strategy.kind", "parameter_server")


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """The devices, the devices of each replica, and the placement of the model on them."""

    kind: Literal["auto", "multi_worker_mirrored", "parameter_server"] = entry(
        "auto", change=Change.FREE
    )
    devices: Literal["auto"] | Annotated[tuple[str, ...], Meta(min_length=1)] = entry(
        "auto", change=Change.FREE
    )
    virtual_devices: Annotated[int, Meta(ge=1, le=1024)] | Text = entry(8, change=Change.FREE)
    deterministic: bool | int = entry(False)
    logical_devices: NumDevices | Text = entry(1, change=Change.FREE)
    slices: NumDevices = entry(1, change=Change.FREE)
    partition: PartitionName = entry("replicated", change=Change.FREE)
    whole_below: Annotated[int, Meta(ge=0)] = entry(4096, change=Change.FREE)
    servers: NumDevices = entry(1, change=Change.FREE, only_if=_ON_SERVERS)
    workers: NumDevices = entry(2, change=Change.FREE, only_if=_ON_SERVERS)
    max_staleness: Literal["any"] | CountOrZero = entry(
        "any", change=Change.FREE, only_if=_ON_SERVERS
    )


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The global batch, and the held-out examples."""

    batch_size: Count = entry(64)
    test_fraction: Fraction = entry(0.2, change=Change.NEVER)
    seed: Seed = entry(0, change=Change.NEVER)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and the schedule of its learning rate."""

    learning_rate: Positive = entry(3e-3)
    schedule: Literal["cosine", "constant"] = entry("cosine")
    warmup_steps: CountOrZero = entry(20)
    weight_decay: PositiveOrZero = entry(1e-4)
    clip_norm: PositiveOrZero = entry(0.0)
    update: Literal["replicated", "sharded", "compressed"] = entry("replicated")
    compression: Literal["bf16", "int8"] = entry("int8", only_if=_COMPRESSED)
    workers: Count = entry(2, only_if=_COMPRESSED)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The number of steps, and how often to log and evaluate."""

    steps: Count = entry(400, change=Change.FREE)
    log_every: Count = entry(20, change=Change.FREE)
    evaluate_every: Count = entry(100, change=Change.FREE)
    seed: Seed = entry(0)
    donate: bool = entry(False, change=Change.FREE)
    program: LocalPathOrNone = entry("", change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class CompilerConfig:
    """Options of XLA's compiler for the train step; see `RunOptions.compiler_options`.

    The keys of this section are the names of the options.
    """

    options: CompilerOptions = entry(())

    @called("CompilerConfig")
    def __post_init__(self) -> None:
        object.__setattr__(self, "options", as_compiler_options(self.options))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often to save, and whether to resume from an existing checkpoint."""

    directory: LocalPath = entry("runs/digits_mirrored/checkpoints", change=Change.FREE)
    every: Count = entry(100, change=Change.FREE)
    keep: Count = entry(3, change=Change.FREE)
    resume: bool = entry(True, change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """The files at the end of a run. With an empty `picture`, none is drawn."""

    directory: LocalPath = entry("runs/digits_mirrored", change=Change.FREE)
    metrics: LocalPath = entry("metrics.json", change=Change.FREE)
    picture: LocalPathOrNone = entry("learning_curve.png", change=Change.FREE)


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The sections of every task. A task adds its own sections and defaults."""

    task: str = ""
    strategy: StrategyConfig = section(StrategyConfig)
    data: BatchConfig = section(BatchConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    training: TrainingConfig = section(TrainingConfig)
    compiler: CompilerConfig = section(CompilerConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    output: OutputConfig = section(OutputConfig)

    @called(lambda self: f"jobs.{type(self).__name__}")
    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            given, kind = getattr(self, field.name), hints[field.name]
            # Without this check, a dict for a section would fail later, with an unclear message.
            if dataclasses.is_dataclass(kind):
                remedy = f"Leave {field.name} out, or pass {kind.__name__}()."
                what = f"the section {kind.__name__}"
                check_instance(field.name, given, kind, what, remedy)
            elif not isinstance(given, str) or given != field.default:
                raise refuse(
                    ArgumentError,
                    f"{field.name}={show(given)}.",
                    f"{field.name} is {field.default!r}.",
                    f"Leave {field.name} out.",
                )


def check_config(config: Any) -> None:
    """Raise if an argument is not the configuration of a task."""
    what = "the configuration of a task, such as a jobs.DigitsConfig"
    check_instance("config", config, JobConfig, what, "Pass load_job_config(path).values.")
