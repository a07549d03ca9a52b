"""Checks the entries of a job against each other and against its files, before it starts."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist import tpu
from jaxdist._buckets import BucketPath, Place, as_place
from jaxdist._checkpoints import read_dict
from jaxdist._validate import show
from jaxdist.errors import BucketError, CheckpointError, ConfigError, TopologyError
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import (
    OutputConfig,
    count_logical_devices,
    list_inner_axes,
)
from jaxdist.jobs._partitions import PARTITIONS, list_like
from jaxdist.training import require_extra

# MLIR's indices of arrays are int32, so a dim cannot be larger.
MOST_ROWS = (1 << 31) - 1


def check_job(
    loaded: LoadedConfig[Any], *, num_replicas: int, num_examples: int, examples: str
) -> None:
    """Check that entries do not contradict each other, and make the directories of the output.

    Raises:
        ConfigError: The batch does not fit the replicas or the data; warm-up is longer than the
            training; a file of the output cannot be written.
        MissingExtraError: A picture is configured and matplotlib is not installed.
    """
    # Check now, not at the end of the training, when the picture is drawn.
    if loaded.values.output.picture:
        require_extra("matplotlib", "draw the learning curve (output.picture)")
    _check_batch_size(loaded, num_replicas, num_examples, examples)
    _check_warmup(loaded)
    _check_files(loaded)


def _check_batch_size(loaded: LoadedConfig[Any], replicas: int, rows: int, examples: str) -> None:
    size, where = loaded.values.data.batch_size, loaded.origin("data.batch_size")
    if rows < replicas:
        fraction = loaded.values.data.test_fraction
        raise ConfigError(
            f"There are {rows} {examples} to train on, and {replicas} replicas.\n\n"
            f"Each replica needs one of the {examples} for a step.\n\nHold out less than "
            f"data.test_fraction {fraction:g} "
            f"({loaded.origin('data.test_fraction')}), cut the data into more {examples}, or "
            "train on fewer devices."
        )
    if size > rows:
        raise ConfigError(
            f"{where}: data.batch_size is {size}, and there are {rows} {examples} to train on.\n\n"
            f"A batch has at most all of them.\n\n"
            f"Set data.batch_size to {rows - rows % replicas} or less."
        )
    if size < replicas:
        raise ConfigError(
            f"{where}: data.batch_size is {size}, and there are {replicas} replicas.\n\n"
            f"Each replica takes at least one of the {examples} in each step.\n\n"
            f"Set data.batch_size to {replicas} or more."
        )
    _check_micro_batches(loaded, replicas, rows)
    # Otherwise the rows are divided as evenly as can be, and a step weighs each row equally.
    if size % replicas and loaded.values.strategy.deterministic:
        low, high = size - size % replicas, size + -size % replicas
        values = [v for v in (low, high) if 0 < v <= rows]
        raise ConfigError(
            f"{where}: data.batch_size is {size}, and there are {replicas} replicas.\n\n"
            "With strategy.deterministic, all replicas take the same number of rows: a multiple "
            f"of {replicas}.\n\n"
            f"Set data.batch_size to {' or '.join(map(str, values))}, or strategy.deterministic "
            "to false."
        )


def _check_micro_batches(loaded: LoadedConfig[Any], replicas: int, rows: int) -> None:
    """Check that replicas whose devices divide their work have the same rows and micro-batches."""
    asked, size = loaded.values.strategy, loaded.values.data.batch_size
    count = max(asked.micro_batches, 1)
    inner = list_inner_axes(asked)
    if (not inner and count == 1) or size % (replicas * count) == 0:
        return
    if count == 1 and "stage" not in inner:
        low, high = size - size % replicas, size + -size % replicas
        values = [str(v) for v in (low, high) if 0 < v <= rows]
        raise ConfigError(
            f"{loaded.origin('data.batch_size')}: data.batch_size is {size}, and there are "
            f"{replicas} replicas, whose devices divide {' and '.join(inner)}.\n\n"
            "Such replicas have the same number of rows.\n\n"
            f"Set data.batch_size to {' or '.join(values)}."
        )
    low, high = size - size % (replicas * count), size + -size % (replicas * count)
    values = [str(v) for v in (low, high) if 0 < v <= rows]
    own = size // replicas
    fitting = [n for n in range(1, own + 1) if own % n == 0 and size % replicas == 0]
    remedies = [f"data.batch_size to {' or '.join(values)}"] if values else []
    if fitting and asked.micro_batches:
        remedies.append(f"strategy.micro_batches to one of {fitting}")
    if not remedies:
        remedies = ["strategy.stages and strategy.micro_batches to 1"]
    raise ConfigError(
        f"{loaded.origin('data.batch_size')}: data.batch_size is {size}, strategy.micro_batches is "
        f"{asked.micro_batches}, and there are {replicas} replica(s).\n\n"
        "All replicas run the same micro-batches, with the same number of rows.\n\n"
        f"Set {', or '.join(remedies)}."
    )


def _check_warmup(loaded: LoadedConfig[Any]) -> None:
    warmup, steps = loaded.values.optimizer.warmup_steps, loaded.values.training.steps
    if warmup > steps:
        raise ConfigError(
            f"{loaded.origin('optimizer.warmup_steps')}: optimizer.warmup_steps is {warmup}, and "
            f"training.steps is {steps}.\n\n"
            "The warm-up of the learning rate ends within the training.\n\n"
            f"Set optimizer.warmup_steps to {steps // 10} or training.steps above {warmup}."
        )


def _check_files(loaded: LoadedConfig[Any]) -> None:
    """Make the directories of the output, and check that files can be written there."""
    output, folder = loaded.values.output, find_output(loaded.values.output)
    names = {"metrics": output.metrics, "picture": output.picture}
    if isinstance(folder, BucketPath):
        _check_bucket(folder, names, loaded)
    else:
        _make_folder(folder, "output.directory", loaded)
    for entry, name in names.items():
        path = folder / name
        if isinstance(path, BucketPath):
            continue
        if name:
            _make_folder(path.parent, f"output.{entry}", loaded)
        if name and path.is_dir():
            raise ConfigError(
                f"{loaded.origin(f'output.{entry}')}: output.{entry} {name!r} is a directory "
                f"({path}).\n\nIt is the name of a file.\n\n"
                "Set it to another name, such as "
                f"{name + '.' + ('json', 'png')[entry == 'picture']!r}."
            )
    if Path(output.metrics) == Path(output.picture):
        raise ConfigError(
            f"{loaded.origin('output.picture')}: output.picture and output.metrics are one file, "
            f"{output.picture!r}.\n\nThe picture and the metrics are two files.\n\n"
            "Set output.picture to another name, such as 'learning_curve.png'."
        )


def find_output(output: OutputConfig) -> Place:
    """Return the directory of the output, a local path as it was given."""
    place = as_place("output.directory", output.directory, "runs/job")
    return place if isinstance(place, BucketPath) else Path(output.directory)


def _check_bucket(folder: BucketPath, names: Mapping[str, str], loaded: LoadedConfig[Any]) -> None:
    """Check that objects can be written and deleted, and that the files are in the folder."""
    for entry, name in names.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"{loaded.origin(f'output.{entry}')}: output.{entry} is {name!r}, and "
                f"output.directory is {str(folder)!r}.\n\n"
                "In a bucket the files are below output.directory.\n\n"
                f"Set output.{entry} to a name, such as {Path(name).name!r}."
            )
    try:
        folder.check_bucket(must_write=True)
    except BucketError as error:
        found, _, remedy = str(error).partition("\n\n")
        raise ConfigError(
            f"{loaded.origin('output.directory')}: nothing can be written to output.directory: "
            f"{found}\n\n{remedy}"
        ) from error


def _make_folder(folder: Path, name: str, loaded: LoadedConfig[Any]) -> None:
    # `os.access` would be wrong for root, for read-only file systems and for full disks.
    probe = folder / f".{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{loaded.origin(name)}: nothing can be written to {str(folder)!r} ({name}): "
            f"{error}.\n\nIt is a directory that you may write to, or one that can be created.\n\n"
            f"Set {name} to another directory, or change its permissions."
        ) from error


def make_not_empty_error(directory: Place, steps: tuple[int, ...]) -> CheckpointError:
    """Return the error for a run that would start from step 0 in a directory with checkpoints."""
    return CheckpointError(
        f"{directory} holds checkpoints of steps {list(steps)}, and checkpoint.resume is false."
        "\n\nA training from the beginning needs a directory without checkpoints.\n\nResume from "
        "them with --set checkpoint.resume=true, start elsewhere with "
        "--set checkpoint.directory=..., or move them away."
    )


def check_output_is_ours(loaded: LoadedConfig[Any], losses: Sequence[float]) -> None:
    """Check that the output directory has no metrics of another run.

    Args:
        loaded: The configuration of the run.
        losses: The losses of its steps so far.

    Raises:
        ConfigError: The metrics file in the directory has other losses.
    """
    output = loaded.values.output
    path = find_output(output) / output.metrics
    there = read_dict(path)
    if there is None or not isinstance(there.get("losses"), list):
        return
    # The file may be ahead of the checkpoint or behind it, so compare only the common steps.
    known = min(len(losses), len(there["losses"]))
    # Without a common step, nothing shows that the file belongs to this run.
    if known == 0 or list(losses[:known]) != there["losses"][:known]:
        raise ConfigError(
            f"{loaded.origin('output.directory')}: {str(path)!r} holds the metrics of another run "
            f"({len(there['losses'])} steps).\n\n"
            "A run writes over its own metrics only.\n\n"
            "Write elsewhere, with --set output.directory=..., or move the file away."
        )


def check_same_data(
    directory: Place, step: int, notes: Mapping[str, Any], identity: Mapping[str, Any]
) -> None:
    """Check that a checkpoint was trained with the same held-out examples."""
    saved = notes["data"]
    other = [
        f"data.{key}: saved {saved.get(key)}, now {value}"
        for key, value in identity.items()
        if saved.get(key) != value
    ]
    if other:
        raise CheckpointError(
            f"Checkpoint {step} in {directory} was trained on another part of the data:\n"
            + "\n".join(other)
            + "\n\nExamples that are held out now may have been trained on.\n\n"
            "Use the saved values, or another checkpoint.directory."
        )


def check_not_beyond(directory: Place, step: int, num_steps: int) -> None:
    """Check that a checkpoint is not from after the configured end of training."""
    if step > num_steps:
        raise CheckpointError(
            f"Checkpoint {step} in {directory} is beyond the end: training.steps is "
            f"{num_steps}.\n\nA run continues from a step before its end.\n\nSet training.steps to "
            f"{step} or more, or use another checkpoint.directory."
        )


_SHAPE = re.compile(r"^[1-9]\d*(x[1-9]\d*){1,3}$")


class Abilities(NamedTuple):
    """What of a task's model the devices of a replica can divide, besides its parameters."""

    stages: bool
    positions: bool
    experts: bool


def check_strategy_entries(loaded: LoadedConfig[Any], *, can_split: bool, has: Abilities) -> None:
    """Check that the entries of a strategy fit each other and the optimizer.

    Args:
        loaded: The configuration.
        can_split: Whether the task's model has layers that tensor parallelism splits.
        has: What else of its model devices can divide.

    Raises:
        ConfigError: A slice or the logical devices have invalid syntax, or two entries contradict
            each other.
    """
    _check_syntax(loaded)
    _check_processes(loaded)
    _check_servers(loaded)
    _check_logical(loaded, can_split)
    _check_inner_axes(loaded, has)
    _check_stages(loaded)
    _check_slices(loaded)
    _check_update(loaded)
    _check_deterministic(loaded)


def _check_syntax(loaded: LoadedConfig[Any]) -> None:
    asked = loaded.values.strategy
    if isinstance(asked.virtual_devices, str):
        try:
            tpu.slice_of(asked.virtual_devices)
        except TopologyError as error:
            raise ConfigError(f"{loaded.origin('strategy.virtual_devices')}: {error}") from None
    shape = asked.logical_devices
    if isinstance(shape, str) and not _SHAPE.match(shape):
        raise ConfigError(
            f"{loaded.origin('strategy.logical_devices')}: strategy.logical_devices is "
            f"{shape!r}, which is neither a number nor a shape.\n\n"
            "It is the number of devices of one replica, or their shape.\n\n"
            'Set it for instance to 2, or to "2x1".'
        )


def _check_processes(loaded: LoadedConfig[Any]) -> None:
    asked = loaded.values.strategy
    if asked.kind != "multi_worker_mirrored":
        return
    if asked.devices != "auto":
        rule = "Each process uses all of its devices."
        raise _make_kind_error(loaded, "strategy.devices", asked.devices, "auto", rule)
    if count_logical_devices(asked) != 1:
        rule = "Devices of several processes divide a replica by stages, positions or experts only."
        raise _make_kind_error(loaded, "strategy.logical_devices", asked.logical_devices, 1, rule)
    if isinstance(asked.virtual_devices, str):
        rule = "Slices of virtual TPUs are in one process."
        count = tpu.slice_of(asked.virtual_devices).num_cores
        raise _make_kind_error(
            loaded, "strategy.virtual_devices", asked.virtual_devices, count, rule
        )
    if asked.slices != 1:
        rule = "The devices of a job of several processes are not in slices."
        raise _make_kind_error(loaded, "strategy.slices", asked.slices, 1, rule)


def _make_kind_error(
    loaded: LoadedConfig[Any], name: str, found: Any, good: Any, rule: str
) -> ConfigError:
    """Return the error for an entry that does not fit `strategy.kind`."""
    return ConfigError(
        f"{loaded.origin(name)}: {name} is {show(found)}, and strategy.kind is "
        f"{loaded.values.strategy.kind!r}.\n\n{rule}\n\n"
        f'Set {name} to {good!r}, or strategy.kind to "auto".'
    )


def _check_servers(loaded: LoadedConfig[Any]) -> None:
    asked, optimizer = loaded.values.strategy, loaded.values.optimizer
    if asked.kind != "parameter_server":
        return
    rule = "A worker is one replica, and the servers update each variable by itself."
    wrong = {
        "strategy.devices": (asked.devices, "auto"),
        "strategy.logical_devices": (asked.logical_devices, 1),
        "strategy.stages": (asked.stages, 1),
        "strategy.positions": (asked.positions, 1),
        "strategy.experts": (asked.experts, 1),
        "strategy.slices": (asked.slices, 1),
        "strategy.deterministic": (asked.deterministic, False),
        "strategy.partition": (asked.partition, "replicated"),
        "optimizer.update": (optimizer.update, "replicated"),
        "optimizer.clip_norm": (optimizer.clip_norm, 0.0),
    }
    for name, (found, good) in wrong.items():
        if found != good:
            raise _make_kind_error(loaded, name, found, good, rule)


def _check_logical(loaded: LoadedConfig[Any], can_split: bool) -> None:
    asked, where = loaded.values.strategy, loaded.origin("strategy.partition")
    name, count = asked.partition, count_logical_devices(asked)
    is_split = PARTITIONS[name].is_split
    whole, split = (" or ".join(map(repr, list_like(name, is_split=s))) for s in (False, True))
    # For replicated state, a partition that also shards it is a second way.
    both = " or ".join(map(repr, list_like(name, is_split=True, is_sharded=True)))
    if is_split and not can_split:
        raise ConfigError(
            f"{where}: strategy.partition is {name!r}, and task is {loaded.values.task!r}.\n\n"
            "The model of this task has no layers that are split over logical devices.\n\n"
            f"Set strategy.partition to {whole}."
        )
    if is_split and count == 1:
        raise ConfigError(
            f"{where}: strategy.partition is {name!r}, and strategy.logical_devices is 1.\n\n"
            "It splits parameters over the logical devices of a replica, 2 or more.\n\n"
            f"Set strategy.logical_devices to 2 or more, or strategy.partition to {whole}."
        )
    if not is_split and count > 1:
        ways = " or ".join(dict.fromkeys((split, both)))
        remedy = f"Set strategy.partition to {ways}, or s" if can_split else "S"
        raise ConfigError(
            f"{where}: strategy.partition is {name!r}, and strategy.logical_devices is {count}."
            f"\n\nWith it the {count} devices of a replica would all do the same work.\n\n"
            f"{remedy}et strategy.logical_devices to 1."
        )


# The entries of each axis within a replica, with the values that ask for none; and why a task has
# no such axis.
_ENTRIES = {
    "stages": {"stages": 1, "schedule": "1f1b", "micro_batches": 0, "chunks": 1},
    "positions": {"positions": 1, "attention": "ulysses", "order": "zigzag"},
    "experts": {"experts": 1},
}
_WHY_NOT = {
    "stages": "The model of this task has no stacked layers, which are the stages of a pipeline.",
    "positions": "The model of this task has no attention, whose positions devices could divide.",
    "experts": "The model of this task has no experts.",
}


def _check_inner_axes(loaded: LoadedConfig[Any], has: Abilities) -> None:
    asked, update = loaded.values.strategy, loaded.values.optimizer.update
    for axis, entries in _ENTRIES.items():
        for name, usual in entries.items():
            found = getattr(asked, name)
            if found != usual and not getattr(has, axis):
                raise ConfigError(
                    f"{loaded.origin(f'strategy.{name}')}: strategy.{name} is {found!r}, and task "
                    f"is {loaded.values.task!r}.\n\n{_WHY_NOT[axis]}\n\n"
                    f"Leave strategy.{name} out, or set it to {usual!r}."
                )
        size = getattr(asked, axis)
        # Without an axis for it, the state of an update of one's own would not follow parameters.
        if size > 1 and axis != "positions" and update != "replicated":
            raise ConfigError(
                f"{loaded.origin('optimizer.update')}: optimizer.update is {update!r}, and "
                f"strategy.{axis} is {size}.\n\n"
                f"The state of the optimizer is on the devices of its {_PLACES[axis]}.\n\n"
                "Set optimizer.update to 'replicated'; with strategy.partition 'fsdp' it is in "
                "pieces too."
            )


_PLACES = {"stages": "layers", "experts": "experts"}


def _check_stages(loaded: LoadedConfig[Any]) -> None:
    asked = loaded.values.strategy
    if asked.chunks > 1 and asked.stages == 1:
        raise ConfigError(
            f"{loaded.origin('strategy.chunks')}: strategy.chunks is {asked.chunks}, and "
            "strategy.stages is 1.\n\nA stage has several parts of the model, its chunks, so that "
            "it waits less for the other stages.\n\n"
            "Set strategy.stages to 2 or more, or strategy.chunks to 1."
        )


def _check_slices(loaded: LoadedConfig[Any]) -> None:
    asked = loaded.values.strategy
    if asked.slices > 1 and not PARTITIONS[asked.partition].is_in_slice:
        names = list_like(asked.partition, is_sharded=True, is_in_slice=True)
        raise ConfigError(
            f"{loaded.origin('strategy.slices')}: strategy.slices is {asked.slices}, and "
            f"strategy.partition is {asked.partition!r}.\n\n"
            "Slices are for a partition within slices.\n\nSet strategy.slices to 1, or "
            f"strategy.partition to {' or '.join(map(repr, names))}."
        )


def _check_update(loaded: LoadedConfig[Any]) -> None:
    name, update = loaded.values.strategy.partition, loaded.values.optimizer.update
    is_split = PARTITIONS[name].is_split
    if (update == "compressed" and name != "replicated") or (update == "sharded" and is_split):
        raise ConfigError(
            f"{loaded.origin('optimizer.update')}: optimizer.update is "
            f"{update!r}, and strategy.partition is {name!r}.\n\n"
            "This partition decides where the state of the optimizer is.\n\n"
            "Set optimizer.update to 'replicated'; with 'fsdp' in strategy.partition the state "
            "is in pieces too."
        )


def _check_deterministic(loaded: LoadedConfig[Any]) -> None:
    asked = loaded.values.strategy
    several = [axis for axis in _ENTRIES if getattr(asked, axis) > 1]
    if asked.deterministic is not False and several:
        name = f"strategy.{several[0]}"
        raise ConfigError(
            f"{loaded.origin('strategy.deterministic')}: strategy.deterministic is "
            f"{str(asked.deterministic).lower()}, and {name} is {getattr(asked, several[0])}.\n\n"
            "Virtual replicas share devices, and here a replica has several devices.\n\n"
            f"Set {name} to 1, or strategy.deterministic to false."
        )
    if asked.deterministic is not False and asked.partition != "replicated":
        raise ConfigError(
            f"{loaded.origin('strategy.deterministic')}: strategy.deterministic is "
            f"{str(asked.deterministic).lower()}, and strategy.partition is "
            f"{asked.partition!r}.\n\n"
            "Virtual replicas share devices, so their state is replicated.\n\n"
            "Set strategy.partition to 'replicated', or strategy.deterministic to false."
        )
