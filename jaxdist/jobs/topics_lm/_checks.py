"""Checks of a language model's configuration: entries that must fit each other."""

import re

from jaxdist import tpu
from jaxdist.errors import ConfigError, TopologyError
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs.topics_lm._schema import TopicsConfig
from jaxdist.jobs.topics_lm._strategy import count_logical_devices
from jaxdist.jobs.topics_lm._text import VOCABULARY

_SHAPE = re.compile(r"^[1-9]\d*(x[1-9]\d*){1,3}$")


def check_entries(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that entries fit each other, before anything is started.

    Raises:
        ConfigError: Heads do not divide the width, or have an odd number of dims; the slice or
            the logical devices have a wrong syntax, or do not fit the partition.
    """
    _check_slice(loaded)
    _check_logical(loaded)
    _check_heads(loaded)
    _check_partition(loaded)


def _check_slice(loaded: LoadedConfig[TopicsConfig]) -> None:
    name = loaded.values.strategy.virtual_slice
    try:
        tpu.slice_of(name)
    except TopologyError as error:
        raise ConfigError(f"{loaded.origin('strategy.virtual_slice')}: {error}") from None


def _check_logical(loaded: LoadedConfig[TopicsConfig]) -> None:
    asked = loaded.values.strategy.logical_devices
    if isinstance(asked, str) and not _SHAPE.match(asked):
        raise ConfigError(
            f"{loaded.origin('strategy.logical_devices')}: strategy.logical_devices is "
            f"{asked!r}, which is neither a number nor a shape.\n\n"
            "It is the number of devices of one replica, or their shape.\n\n"
            'Set it for instance to 2, or to "2x1".'
        )


def _check_heads(loaded: LoadedConfig[TopicsConfig]) -> None:
    width, heads = loaded.values.model.width, loaded.values.model.heads
    # Rotary positions rotate pairs of dims, so a head needs an even number of dims.
    fitting = [n for n in range(1, width + 1) if width % n == 0 and width // n % 2 == 0]
    if heads not in fitting:
        near = sorted(fitting, key=lambda n: abs(n - heads))[:2]
        raise ConfigError(
            f"{loaded.origin('model.heads')}: model.heads is {heads}, and model.width is {width}."
            "\n\nAll heads have the same even number of dims.\n\n"
            + (
                f"Set model.heads to {' or '.join(map(str, sorted(near)))}."
                if near
                else f"Set model.width to an even number, such as {width + 1}."
            )
        )


def _check_partition(loaded: LoadedConfig[TopicsConfig]) -> None:
    config, where = loaded.values, loaded.origin("strategy.partition")
    name, count = config.strategy.partition, count_logical_devices(config)
    is_split = "tensor_parallel" in name
    in_slice = "fsdp_in_slice_tensor_parallel" if is_split else "fsdp_in_slice"
    split = "fsdp_in_slice_tensor_parallel" if "in_slice" in name else "fsdp_tensor_parallel"
    if is_split and count == 1:
        raise ConfigError(
            f"{where}: strategy.partition is {name!r}, and strategy.logical_devices is 1.\n\n"
            "It splits parameters over the logical devices of a replica, 2 or more.\n\n"
            "Set strategy.logical_devices to 2 or more, or strategy.partition to "
            f"{name.removesuffix('_tensor_parallel') if 'fsdp' in name else 'replicated'!r}."
        )
    if not is_split and count > 1:
        raise ConfigError(
            f"{where}: strategy.partition is {name!r}, and strategy.logical_devices is {count}."
            f"\n\nWith it the {count} devices of a replica would all do the same work.\n\n"
            f"Set strategy.partition to 'tensor_parallel' or {split!r}, or "
            "strategy.logical_devices to 1."
        )
    slices = config.strategy.slices
    if slices > 1 and "in_slice" not in name:
        raise ConfigError(
            f"{loaded.origin('strategy.slices')}: strategy.slices is {slices}, and "
            f"strategy.partition is {name!r}.\n\n"
            "Slices are for a partition within slices.\n\n"
            f"Set strategy.slices to 1, or strategy.partition to {in_slice!r}."
        )
    update = config.optimizer.update
    if (update == "compressed" and name != "replicated") or (update == "sharded" and is_split):
        raise ConfigError(
            f"{loaded.origin('optimizer.update')}: optimizer.update is "
            f"{update!r}, and strategy.partition is {name!r}.\n\n"
            "This partition decides where the state of the optimizer is.\n\n"
            "Set optimizer.update to 'replicated'; with 'fsdp' in strategy.partition the state "
            "is in pieces too."
        )
    # Tensor parallelism splits heads, hidden dims and the vocabulary over the logical devices.
    if is_split:
        _check_divides(loaded, count)


def _check_divides(loaded: LoadedConfig[TopicsConfig], count: int) -> None:
    for entry, what in {"heads": "attention", "hidden": "the MLP"}.items():
        size = getattr(loaded.values.model, entry)
        if size % count:
            low, high = size - size % count, size + -size % count
            raise ConfigError(
                f"{loaded.origin(f'model.{entry}')}: model.{entry} is {size}, and {count} "
                f"logical devices cannot share {what} equally.\n\n"
                f"Each logical device has the same part: model.{entry} is a multiple of "
                f"{count}.\n\n"
                f"Set model.{entry} to {' or '.join(str(n) for n in (low, high) if n)}, or "
                f"strategy.logical_devices to a divisor of {size}."
            )
    if VOCABULARY % count:
        raise ConfigError(
            f"{loaded.origin('strategy.logical_devices')}: strategy.logical_devices is {count}, "
            f"and the vocabulary has {VOCABULARY} bytes.\n\n"
            f"Each logical device has the same number of them.\n\n"
            f"Set it to a power of two, up to {VOCABULARY}."
        )
