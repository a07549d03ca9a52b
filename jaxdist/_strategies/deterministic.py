"""The option `deterministic` of strategies."""

import dataclasses
from typing import Any

from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ArgumentError

DEFAULT_VIRTUAL_REPLICAS = 8


def add_virtual_replicas(layout: ReplicaMesh, deterministic: bool | int) -> ReplicaMesh:
    """Return the mesh with the number of virtual replicas in `deterministic`; False adds none.

    Raises:
        ArgumentTypeError: `deterministic` is neither a boolean nor an integer.
        ArgumentError: The number is not a power of two, the devices do not divide it, or there
            are several replica axes or logical devices.
    """
    # A `bool` is an `int`: this accepts both.
    caller = name_call()
    if not isinstance(deterministic, int):
        raise refuse_type(
            f"deterministic={deterministic!r} of type {type(deterministic).__name__}.",
            "deterministic is True, False or a number of virtual replicas; True stands for "
            f"{DEFAULT_VIRTUAL_REPLICAS}.",
            "Pass deterministic=True.",
        )
    if deterministic is False:
        return layout
    count = DEFAULT_VIRTUAL_REPLICAS if deterministic is True else deterministic
    given = f"{caller}(deterministic={deterministic})"
    if count < 2 or not _is_power(count):
        near = (1 << (count.bit_length() - 1), 1 << count.bit_length()) if count > 2 else (2, 4, 8)
        raise ArgumentError(
            f"{given}: the number of virtual replicas is {count}.\n\n"
            "Values of virtual replicas are added in pairs, and pairs of pairs, so their number is "
            "a power of two, from 2 up."
            f"\n\nUse {' or '.join(map(str, near))}."
        )
    _check_axes(given, layout)
    if count % layout.num_replicas:
        raise ArgumentError(_explain_division(given, layout.num_replicas, count))
    return dataclasses.replace(layout, num_virtual=count)


def check_no_ops_with_deterministic(ops: Any, deterministic: Any) -> None:
    """Raise for `cross_device_ops` together with virtual replicas.

    Raises:
        ArgumentError: Both were given.
    """
    if ops is not None and deterministic:
        raise refuse(
            f"cross_device_ops={ops!r} and deterministic={deterministic!r}.",
            "Values of virtual replicas are added by one tree, on any devices.",
            "Leave one of them out.",
        )


def _is_power(count: int) -> bool:
    return not count & (count - 1)


def _check_axes(given: str, layout: ReplicaMesh) -> None:
    if len(layout.replica_axes) > 1:
        raise ArgumentError(
            f"{given}: the replicas run over {len(layout.replica_axes)} mesh axes, "
            f"{layout.replica_axes}.\n\n"
            "Virtual replicas are numbered along one axis: with two axes, their number along each "
            "would depend on the devices.\n\n"
            f"Give a mesh with one replica axis of {layout.num_replicas} devices, or leave "
            "deterministic out."
        )
    if layout.num_logical > 1:
        raise ArgumentError(
            f"{given}: each replica spans {layout.num_logical} devices "
            f"({dict(layout.mesh.shape)}).\n\n"
            "XLA chooses the order of sums over the devices of one replica, so the bits would "
            "depend on it.\n\n"
            "Give each replica one device, or leave deterministic out."
        )


def _explain_division(given: str, num_devices: int, count: int) -> str:
    fitting = [1 << k for k in range(count.bit_length())]
    below = max(n for n in fitting if n <= num_devices)
    more = f", or deterministic={num_devices}" if _is_power(num_devices) else ""
    return (
        f"{given}: {num_devices} devices cannot share {count} virtual replicas.\n\n"
        f"Each device takes the same number of them, so {', '.join(map(str, fitting))} devices "
        f"fit.\n\nUse {below} of the {num_devices} devices{more}."
    )
