"""Describes the machine of a plan: a slice of TPUs, or a cluster of GPUs."""

import dataclasses
from typing import Any

from jaxdist._collectives import Communication
from jaxdist._gpus import is_gpu_name
from jaxdist._planning import gpus, slices
from jaxdist._planning.slice_axes import Axes, Target


def make_target(
    topology: Any,
    logical: Any,
    axes: Axes | None = None,
    communication: Communication | None = None,
) -> Target:
    """Return a strategy on all devices of a described machine.

    Args:
        topology: The slice, or the GPUs.
        logical: The logical devices of a replica.
        axes: The axes of its mesh.
        communication: How its replicas communicate.

    Raises:
        TopologyError: The machine does not exist, or the logical devices do not divide it.
        MissingExtraError: libtpu, or JAX's CUDA plugin, is not installed.
        ArgumentTypeError: `topology` does not name a machine.
        ArgumentError: The replicas cannot be divided among the axes.
    """
    return _put_on(_find_kind(topology).describe(topology, logical), axes, communication)


def make_single_device_target(
    of: Target, axes: Axes | None, communication: Communication | None
) -> Target:
    """Return a target of one device of the same kind."""
    one = _find_kind(of.name).describe_one_like(of)
    return _put_on(one, axes and axes.single_device, communication)


def list_logical_counts(topology: Any) -> tuple[int, ...]:
    """Return the numbers of logical devices by which a slice or the GPUs can be divided."""
    found: tuple[int, ...] = _find_kind(topology).list_logical_counts(topology)
    return found


def count_slices(topology: Any) -> int:
    """Return the number of slices in a name such as `v5e:4x4*2`, or of NVLink domains."""
    found: int = _find_kind(topology).count_slices(topology)
    return found


def _find_kind(name: Any) -> Any:
    """Return the module for a machine with this name; both have the same four functions."""
    return gpus if is_gpu_name(name) else slices


def _put_on(target: Target, axes: Axes | None, communication: Communication | None) -> Target:
    """Return the target with its strategy on these axes."""
    if axes is None:
        return target
    layout = axes.apply(target.strategy.layout, target.num_slices)
    return dataclasses.replace(target, strategy=target.strategy._on(layout, communication))
