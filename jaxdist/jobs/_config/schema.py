"""The schema of configurations: dataclasses of the sections that all tasks share.

`load_config` reads names, types, defaults and bounds from these classes. No other list of them
exists. msgspec checks the types and the bounds.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from msgspec import Meta

from jaxdist._called import called, refuse, refuse_type
from jaxdist._program import CompilerOptions, as_compiler_options
from jaxdist._validate import check_instance, show
from jaxdist.errors import ArgumentError, ArgumentTypeError
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
# A path of the local file system; `load_config` turns file:///folder into one.
LocalPath = Annotated[str, Meta(min_length=1, title="a path")]
# Also `gs://` and `s3://`.
Place = Annotated[str, Meta(min_length=1, title="a path or a bucket")]
LocalPathOrNone = Annotated[str, Meta(title="a path")]


# Whether a run may resume from a checkpoint with another value of an entry.
Change: TypeAlias = Literal["free", "knowingly", "never"]


def check_choice(name: str, given: Any, known: Sequence[str]) -> str:
    """Check that an argument is one of several names, and return it."""
    if isinstance(given, str) and given in known:
        return given
    kind = ArgumentError if isinstance(given, str) else ArgumentTypeError
    raise refuse(
        f"{name}={show(given)}.",
        f"{name} is one of {', '.join(known)}.",
        f"Pass for instance {name}={known[0]!r}.",
        kind=kind,
    )


@called("jobs.entry")
def entry(
    default: Any, *, change: Change = "knowingly", only_if: tuple[str, Any] | None = None
) -> Any:
    """Return the field of an entry in a section of a configuration.

    A section is a frozen dataclass. The type of a field says which values an entry accepts:
    `bool`, `int`, `float`, `str`, a tuple of these, a `Literal`, or one of these with bounds,
    such as `Annotated[int, msgspec.Meta(ge=1)]`.

    Args:
        default: The value of the entry where a configuration leaves it out.
        change: Whether a run may resume with another value. `"free"`: yes, since the trained
            parameters do not depend on it. `"knowingly"`: with `--accept-changes`, since from then
            on training gives other parameters. `"never"`: shapes or the held-out examples
            depend on it.
        only_if: The name `"section.key"` and a value of another entry. With other values of that
            entry, this one has no effect, and may change freely.

    Returns:
        The field, for the body of the dataclass. A field with a plain default is an entry that
        changes `"knowingly"`.

    Raises:
        ArgumentError: `change` is not one of the three, or `only_if` does not name an entry.
        ArgumentTypeError: One of them has another type.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class ModelConfig:
        ...     width: int = entry(64, change="never")
        ...     dropout: float = entry(0.0)
        >>> ModelConfig()
        ModelConfig(width=64, dropout=0.0)
    """
    check_choice("change", change, get_args(Change))
    if only_if is not None:
        is_pair = isinstance(only_if, tuple) and len(only_if) == 2
        if not is_pair or not isinstance(only_if[0], str) or "." not in only_if[0]:
            raise refuse_type(
                f"only_if={show(only_if)}.",
                "only_if is the name of another entry and a value of it.",
                'Pass for instance only_if=("optimizer.update", "compressed").',
            )
    return dataclasses.field(default=default, metadata={"change": change, "only_if": only_if})


@called("jobs.section")
def section(kind: type[Any], **defaults: Any) -> Any:
    """Return the field of a section in a configuration.

    Args:
        kind: The frozen dataclass of the section.
        defaults: Defaults of its entries that are not those of its class.

    Returns:
        The field, for the body of a subclass of `JobConfig`.

    Raises:
        ArgumentTypeError: `kind` is not a dataclass.
        ArgumentError: The class has no entry of such a name.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class WineConfig(JobConfig):
        ...     training: TrainingConfig = section(TrainingConfig, steps=50)
        >>> WineConfig().training.steps, WineConfig().training.log_every
        (50, 20)
    """
    given: Any = kind
    if not isinstance(given, type) or not dataclasses.is_dataclass(given):
        raise refuse_type(
            f"kind={show(kind)}.",
            "kind is the class of a section, a frozen dataclass.",
            "Pass for instance kind=jobs.TrainingConfig.",
        )
    names = [f.name for f in dataclasses.fields(given)]
    for name, value in defaults.items():
        if name not in names:
            raise refuse(
                f"{name}={show(value)}.",
                f"{given.__name__} has the entries {', '.join(names)}.",
                "Pass defaults of these.",
            )
    return dataclasses.field(default_factory=functools.partial(kind, **defaults))


_COMPRESSED = ("optimizer.update", "compressed")
_ON_SERVERS = ("strategy.kind", "parameter_server")


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """The section `[strategy]`: the devices, and the placement of the model on them.

    Example:
        >>> StrategyConfig(partition="fsdp").kind
        'auto'
    """

    kind: Literal["auto", "multi_worker_mirrored", "parameter_server"] = entry(
        "auto", change="free"
    )
    devices: Literal["auto"] | Annotated[tuple[str, ...], Meta(min_length=1)] = entry(
        "auto", change="free"
    )
    virtual_devices: Annotated[int, Meta(ge=1, le=1024)] | Text = entry(8, change="free")
    deterministic: bool | int = entry(False)
    logical_devices: NumDevices | Text = entry(1, change="free")
    slices: NumDevices = entry(1, change="free")
    partition: PartitionName = entry("replicated", change="free")
    whole_below: Annotated[int, Meta(ge=0)] = entry(4096, change="free")
    stages: NumDevices = entry(1, change="free")
    schedule: Literal["1f1b", "gpipe", "zero_bubble"] = entry("1f1b", change="free")
    micro_batches: CountOrZero = entry(0, change="free")
    chunks: Count = entry(1, change="free")
    positions: NumDevices = entry(1, change="free")
    attention: Literal["ulysses", "gather", "ring"] = entry("ulysses", change="free")
    order: Literal["zigzag", "contiguous"] = entry("zigzag", change="free")
    experts: NumDevices = entry(1, change="free")
    servers: NumDevices = entry(1, change="free", only_if=_ON_SERVERS)
    workers: NumDevices = entry(2, change="free", only_if=_ON_SERVERS)
    max_staleness: Literal["any"] | CountOrZero = entry("any", change="free", only_if=_ON_SERVERS)


# Axes of the mesh within a replica that the functions of `jaxdist.nn` divide their work over, the
# slowest first, by the entries that give their sizes.
_INNER_AXES = {"stages": "stage", "positions": "positions", "experts": "experts"}


def list_inner_axes(asked: StrategyConfig) -> dict[str, int]:
    """Return the sizes of the axes that divide the work of a replica, without those of size 1.

    Example:
        >>> list_inner_axes(StrategyConfig(stages=2, experts=4, logical_devices=2))
        {'stage': 2, 'experts': 4}
    """
    sizes = {axis: getattr(asked, name) for name, axis in _INNER_AXES.items()}
    return {axis: size for axis, size in sizes.items() if size > 1}


def name_devices(asked: StrategyConfig) -> str:
    """Return the entries that give the number of devices of a replica, for errors."""
    used = [f"strategy.{n}" for n in _INNER_AXES if getattr(asked, n) > 1]
    return " times ".join(["strategy.logical_devices", *used])


def count_logical_devices(asked: StrategyConfig) -> int:
    """Return the number of devices that share the parameters of a replica, or of a part of it."""
    shape = asked.logical_devices
    return shape if isinstance(shape, int) else math.prod(map(int, shape.split("x")))


def count_devices_of_replica(asked: StrategyConfig) -> int:
    """Return the number of devices of each replica, over all axes within it."""
    return math.prod(list_inner_axes(asked).values()) * count_logical_devices(asked)


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The section `[data]`: the global batch, and the held-out examples.

    A task with more entries for its data has a subclass.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class WindowConfig(BatchConfig):
        ...     length: int = entry(128, change="never")
        >>> WindowConfig(batch_size=32)
        WindowConfig(batch_size=32, test_fraction=0.2, seed=0, length=128)
    """

    batch_size: Count = entry(64)
    test_fraction: Fraction = entry(0.2, change="never")
    seed: Seed = entry(0, change="never")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The section `[optimizer]`: AdamW, and the schedule of its learning rate.

    Example:
        >>> OptimizerConfig(clip_norm=1.0).schedule
        'cosine'
    """

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
    """The section `[training]`: the number of steps, and how often to log and evaluate.

    Example:
        >>> TrainingConfig(steps=50).log_every
        20
    """

    steps: Count = entry(400, change="free")
    log_every: Count = entry(20, change="free")
    evaluate_every: Count = entry(100, change="free")
    seed: Seed = entry(0)
    donate: bool = entry(False, change="free")
    program: LocalPathOrNone = entry("", change="free")


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
    """The section `[checkpoint]`: where and how often to save, and whether to resume.

    Example:
        >>> CheckpointConfig(directory="runs/wine/checkpoints").every
        100
    """

    directory: Place = entry("runs/digits_mirrored/checkpoints", change="free")
    every: Count = entry(100, change="free")
    keep: Count = entry(3, change="free")
    resume: bool = entry(True, change="free")


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """The section `[output]`: the files at the end of a run.

    The directory may be in a bucket (`gs://`, `s3://`). With an empty `picture`, none is drawn.

    Example:
        >>> OutputConfig(directory="runs/wine").metrics
        'metrics.json'
    """

    directory: Place = entry("runs/digits_mirrored", change="free")
    metrics: LocalPath = entry("metrics.json", change="free")
    picture: LocalPathOrNone = entry("learning_curve.png", change="free")


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The sections of every task. The subclass of a task adds sections and defaults.

    Attributes:
        task: The name of the task: the default of the class, or `"module:Class"`.
        strategy: The devices, and the placement of the model on them.
        data: The batches.
        optimizer: AdamW, and the schedule of its learning rate.
        training: The number of steps, and how often to log and evaluate.
        compiler: Options of XLA's compiler.
        checkpoint: Where and how often to save.
        output: The files at the end of a run.

    Raises:
        ArgumentTypeError: A section is not of its class.
        ArgumentError: `task` is not the name that the class has.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class ModelConfig:
        ...     width: int = entry(64, change="never")
        >>> @dataclasses.dataclass(frozen=True)
        ... class WineConfig(JobConfig):
        ...     model: ModelConfig = section(ModelConfig)
        ...     data: BatchConfig = section(BatchConfig, batch_size=16)
        >>> config = WineConfig()
        >>> config.model.width, config.data.batch_size, config.training.steps
        (64, 16, 400)
    """

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
            # A class without a name of its own has the name that the file gives: "module:Class".
            elif not isinstance(given, str) or (field.default and given != field.default):
                raise refuse(
                    f"{field.name}={show(given)}.",
                    f"{field.name} is {field.default or 'module:Class'!r}.",
                    f"Leave {field.name} out.",
                )


def check_config(config: Any) -> None:
    """Raise if an argument is not the configuration of a task."""
    what = "the configuration of a task, such as a jobs.DigitsConfig"
    check_instance("config", config, JobConfig, what, "Pass load_job_config(path).values.")
