"""Checks that the entries of `[strategy]` fit each other, before anything starts."""

import re
from typing import Any

from jaxdist import tpu
from jaxdist._validate import show
from jaxdist.errors import ConfigError, TopologyError
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._partitions import PARTITIONS, list_like
from jaxdist.jobs._strategy.build import count_logical_devices

_SHAPE = re.compile(r"^[1-9]\d*(x[1-9]\d*){1,3}$")


def check_strategy_entries(loaded: LoadedConfig[Any], *, can_split: bool) -> None:
    """Check that the entries of a strategy fit each other and the optimizer.

    Args:
        loaded: The configuration.
        can_split: Whether the task's model has layers that tensor parallelism splits.

    Raises:
        ConfigError: A slice or the logical devices have invalid syntax, or two entries contradict
            each other.
    """
    _check_syntax(loaded)
    _check_processes(loaded)
    _check_servers(loaded)
    _check_logical(loaded, can_split)
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
    wrong = {
        "devices": (asked.devices != "auto", "auto", "Each process uses all of its devices."),
        "logical_devices": (
            count_logical_devices(asked) != 1,
            1,
            "Each device of each process is a replica.",
        ),
        "virtual_devices": (
            isinstance(asked.virtual_devices, str),
            4,
            "Slices of virtual TPUs are in one process.",
        ),
        "slices": (asked.slices != 1, 1, "The devices of a job of processes are in no slices."),
    }
    for name, (is_wrong, good, rule) in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{loaded.origin(f'strategy.{name}')}: strategy.{name} is "
                f"{show(getattr(asked, name))}, and strategy.kind is {asked.kind!r}.\n\n{rule}\n\n"
                f'Set strategy.{name} to {good!r}, or strategy.kind to "auto".'
            )


def _check_servers(loaded: LoadedConfig[Any]) -> None:
    asked, optimizer = loaded.values.strategy, loaded.values.optimizer
    if asked.kind != "parameter_server":
        return
    rule = "A worker is one replica, and the servers update each variable by itself."
    wrong = {
        "strategy.devices": (asked.devices, "auto"),
        "strategy.logical_devices": (asked.logical_devices, 1),
        "strategy.slices": (asked.slices, 1),
        "strategy.deterministic": (asked.deterministic, False),
        "strategy.partition": (asked.partition, "replicated"),
        "optimizer.update": (optimizer.update, "replicated"),
        "optimizer.clip_norm": (optimizer.clip_norm, 0.0),
    }
    for name, (found, good) in wrong.items():
        if found != good:
            raise ConfigError(
                f"{loaded.origin(name)}: {name} is {show(found)}, and strategy.kind is "
                f"{asked.kind!r}.\n\n{rule}\n\n"
                f'Set {name} to {good!r}, or strategy.kind to "auto".'
            )


def _check_logical(loaded: LoadedConfig[Any], can_split: bool) -> None:
    asked, where = loaded.values.strategy, loaded.origin("strategy.partition")
    name, count = asked.partition, count_logical_devices(asked)
    is_split = PARTITIONS[name].is_split
    whole, split = (" or ".join(map(repr, list_like(name, is_split=s))) for s in (False, True))
    # Replicated state is like no other, so the sharded partition is a second way.
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
    if asked.deterministic is not False and asked.partition != "replicated":
        raise ConfigError(
            f"{loaded.origin('strategy.deterministic')}: strategy.deterministic is "
            f"{str(asked.deterministic).lower()}, and strategy.partition is "
            f"{asked.partition!r}.\n\n"
            "Virtual replicas share devices, so their state is replicated.\n\n"
            "Set strategy.partition to 'replicated', or strategy.deterministic to false."
        )
