"""The slices that the replicas of a configuration are divided into."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxdist._planning import add_slice_axis
from jaxdist._strategies import Strategy
from jaxdist.errors import ConfigError
from jaxdist.jobs.topics_lm._schema import TopicsConfig


def is_in_slice(config: TopicsConfig) -> bool:
    """Whether state lies in pieces within a slice, and whole in each."""
    return "in_slice" in config.strategy.partition


def slice_of_device(device: Any) -> int:
    """The slice that a TPU says it is in."""
    index: int | None = getattr(device, "slice_index", None)
    return index or 0


def count_device_slices(devices: Sequence[Any]) -> int | None:
    """How many slices TPUs say they are in; None where devices do not say.

    Raises:
        ConfigError: Slices with different numbers of devices.
    """
    if any(d.platform != "tpu" or getattr(d, "slice_index", None) is None for d in devices):
        return None
    counts = Counter(map(slice_of_device, devices))
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"strategy.devices has different numbers of devices of each slice: "
            f"{dict(sorted(counts.items()))}.\n\nAll slices have the same number of devices.\n\n"
            f"Name {min(counts.values())} of each."
        )
    return len(counts)


def add_slices(strategy: Strategy, config: TopicsConfig, there: int | None) -> Strategy:
    """The strategy, with an axis for slices where the partition of the state needs one.

    Args:
        strategy: Replicas of the first slice first.
        config: Says how many slices, where devices do not.
        there: How many slices devices say they are in.

    Raises:
        ConfigError: Devices say another number, or the replicas do not divide by the slices.
    """
    asked = config.strategy.slices
    if not is_in_slice(config):
        return strategy
    if there is not None and asked not in (1, there):
        raise ConfigError(
            f"strategy.slices is {asked}, and the devices are {there} slice(s).\n\n"
            "It is the number of slices that the devices are in.\n\n"
            f"Leave it out, or set it to {there}."
        )
    slices = there or asked
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
