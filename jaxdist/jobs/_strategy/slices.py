"""Finds the slices of the replicas of a strategy."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxdist._planning import add_slice_axis
from jaxdist._strategies import Strategy
from jaxdist.cost import worker_of
from jaxdist.errors import ConfigError
from jaxdist.jobs._config.schema import StrategyConfig
from jaxdist.jobs._partitions import PARTITIONS


def get_slice_index(device: Any) -> int:
    """Return the slice index of a TPU, or the NVLink domain of a GPU; 0 if it has none."""
    if device.platform == "gpu":
        return worker_of(device)
    index: int | None = getattr(device, "slice_index", None)
    return index or 0


def count_device_slices(devices: Sequence[Any]) -> int | None:
    """Return the number of TPU slices or NVLink domains; None if the devices do not show it.

    GPUs of a single domain do not: the configuration may divide them.

    Raises:
        ConfigError: Slices have different numbers of devices.
    """
    is_tpu = all(
        d.platform == "tpu" and getattr(d, "slice_index", None) is not None for d in devices
    )
    is_gpu = all(d.platform == "gpu" for d in devices)
    if not is_tpu and not is_gpu:
        return None
    counts = Counter(map(get_slice_index, devices))
    if is_gpu and len(counts) == 1:
        return None
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"strategy.devices has different numbers of devices of each slice, or NVLink domain: "
            f"{dict(sorted(counts.items()))}.\n\nAll slices have the same number of devices.\n\n"
            f"Name {min(counts.values())} of each."
        )
    return len(counts)


def add_slices(strategy: Strategy, asked: StrategyConfig, there: int | None) -> Strategy:
    """Return the strategy; with an axis for slices if the partition of the state needs one.

    Args:
        strategy: The strategy. Its replicas are in the order of their slices.
        asked: The configured strategy. It gives the number of slices if the devices do not.
        there: The number of slices of the devices; None if unknown.

    Raises:
        ConfigError: The devices and the configuration have different numbers of slices, or the
            number of replicas is not a multiple of the number of slices.
    """
    if not PARTITIONS[asked.partition].is_in_slice:
        return strategy
    # 1 is the default, so it does not contradict the devices.
    if there is not None and asked.slices not in (1, there):
        raise ConfigError(
            f"strategy.slices is {asked.slices}, and the devices are {there} slice(s).\n\n"
            "It is the number of slices that the devices are in.\n\n"
            f"Leave it out, or set it to {there}."
        )
    slices = there or asked.slices
    replicas = strategy.num_replicas_in_sync
    if replicas % slices:
        fitting = [n for n in range(1, replicas + 1) if replicas % n == 0]
        below = max(n for n in fitting if n < slices)
        near = [below, *[n for n in fitting if n > slices][:1]]
        raise ConfigError(
            f"strategy.slices is {slices}, and there are {replicas} replicas.\n\n"
            "All slices have the same number of replicas.\n\nSet strategy.slices to "
            f"{' or '.join(map(str, near))}."
        )
    return add_slice_axis(strategy, slices)
