"""Checks of arguments that several `CrossDeviceOps` share."""

from typing import Any

from jaxdist._validate import as_integer
from jaxdist.errors import ArgumentError


def check_count(name: str, value: Any, *, least: int) -> int:
    """Return `value` as an integer that is not below `least`."""
    return as_integer(name, value, least=least, wrong_type=ArgumentError)
