"""Settings of jobs with several processes: how long each kind of wait may take."""

import dataclasses
import os
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import as_number, show
from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Settings:
    """Times of a job with several processes, in seconds.

    Args:
        quiet_seconds: After this time without progress every process logs which process is behind.
        heartbeat_seconds: A process that sends no heartbeat for this long counts as ended.
        join_seconds: How long a process waits for the others when the job starts.
        abort_seconds: After this time without progress every process ends with code 75. None means
            never.
        collective_seconds: The most that one collective, or one comparison of programs, may take.
        rpc_seconds: How long a call of a parameter server, or of a task, waits for its reply.

    Example:
        >>> from jaxdist._processes.settings import Settings
        >>> Settings().quiet_seconds
        60.0
    """

    quiet_seconds: float = 60.0
    heartbeat_seconds: float = 10.0
    join_seconds: float = 300.0
    abort_seconds: float | None = None
    collective_seconds: float = 1800.0
    rpc_seconds: float = 60.0


_NAMES = tuple(field.name for field in dataclasses.fields(Settings))
# JAX takes whole seconds for these, and 0 would mean no time at all.
_LEAST = {"heartbeat_seconds": 1.0, "join_seconds": 1.0, "collective_seconds": 1.0}
_chosen: dict[str, float] = {}


def variable_of(name: str) -> str:
    """Return the environment variable of a setting, such as `JAXDIST_QUIET_SECONDS`."""
    return f"JAXDIST_{name.upper()}"


def get_settings() -> Settings:
    """Return the settings of this process.

    Values of `config.processes` override environment variables, which override the defaults.

    Raises:
        ArgumentError: An environment variable is not a time.
    """
    return Settings(**(_read_environment() | _chosen))


@called("config.processes")
def processes(
    *,
    quiet_seconds: float | None = None,
    heartbeat_seconds: float | None = None,
    join_seconds: float | None = None,
    abort_seconds: float | None = None,
    collective_seconds: float | None = None,
    rpc_seconds: float | None = None,
) -> Settings:
    """Set how long the processes of a job wait for each other; None leaves a value as it is.

    Each value can also be given as an environment variable: `JAXDIST_QUIET_SECONDS`,
    `JAXDIST_HEARTBEAT_SECONDS`, `JAXDIST_JOIN_SECONDS`, `JAXDIST_ABORT_SECONDS`,
    `JAXDIST_COLLECTIVE_SECONDS` and `JAXDIST_RPC_SECONDS`. A value that is given here overrides the
    variable.

    `heartbeat_seconds`, `join_seconds` and `collective_seconds` are used when this process joins
    the others, so set them before you make the strategy.

    Args:
        quiet_seconds: After this time without progress every process logs which process is behind
            (60).
        heartbeat_seconds: A process that sends no heartbeat for this long counts as ended (10).
        join_seconds: How long a process waits for the others when the job starts (300).
        abort_seconds: After this time without progress every process ends with exit code 75
            (never).
        collective_seconds: The most that one collective, or one comparison of programs, may take
            (1800). It is also the largest `timeout_seconds`.
        rpc_seconds: How long a call of a parameter server, or of a task, waits for its reply (60).

    Returns:
        All settings that now apply.

    Raises:
        ArgumentError: A value is not above 0, or is below 1 where JAX takes whole seconds.
        ArgumentTypeError: A value is not a number.

    Example:
        >>> jaxdist.config.processes(quiet_seconds=60).join_seconds
        300.0
    """
    given = dict(zip(_NAMES, [quiet_seconds, heartbeat_seconds, join_seconds, abort_seconds,
                              collective_seconds, rpc_seconds], strict=True))  # fmt: skip
    # All values are checked before the first is set.
    checked = {name: _check(name, value) for name, value in given.items() if value is not None}
    _chosen.update(checked)
    return get_settings()


@called("The environment variable")
def _read_environment() -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _NAMES:
        text = os.environ.get(variable_of(name), "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            raise ArgumentError(
                f"The environment variable {variable_of(name)} is {show(text)}.\n\n"
                "It is a time in seconds, above 0.\n\n"
                f"Set for instance {variable_of(name)}=60, or unset it."
            ) from None
        found[name] = _check(variable_of(name), value, name)
    return found


def _check(shown: str, value: Any, name: str = "") -> float:
    number = as_number(shown, value, example=60)
    least = _LEAST.get(name or shown, 0.0)
    if number <= 0 or number < least:
        rule = f"is {least:g} or more" if least else "is above 0"
        raise refuse(
            f"{shown}={value!r}.",
            f"{shown} is a time in seconds and {rule}.",
            f"Pass for instance {shown}=60.",
        )
    return number
