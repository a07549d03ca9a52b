"""Checks that several `CrossDeviceOps` make of their arguments."""

from typing import Any

from jaxdist.errors import ArgumentError


def checked_count(caller: str, name: str, value: Any, *, least: int) -> int:
    """`value` as an integer that is not below `least`."""
    is_int = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_int or value.__index__() < least:
        raise ArgumentError(f"{caller}({name}={value!r}): {name} is an integer, {least} or more.")
    return int(value.__index__())
