"""`jax_debug_nans` and `jax_debug_infs`: what JAX raises for programs that were compiled."""

from collections.abc import Sequence
from typing import Any

from jax._src import api_util as _api_util
from jax._src import dispatch as _dispatch

# Waits for JAX to raise a public error for programs that are called as `Compiled`.
InvalidNumberError = _api_util.InternalFloatingPointError


def checks_numbers() -> bool:
    """Whether JAX looks for numbers that are not, in the results of every program."""
    return bool(_dispatch.needs_check_special())


def check_numbers(name: str, arrays: Sequence[Any]) -> None:
    """Raise an error where JAX is told to look for numbers that are none, and there is one."""
    if checks_numbers():
        _dispatch.check_special(name, arrays)
