"""How long, and how often, closures wait for servers and workers."""

import dataclasses
import os

from jaxdist._processes import get_settings
from jaxdist._validate import show
from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class WaitSettings:
    """How long, and how often, closures wait for servers and workers.

    Each can be given as an environment variable, such as `JAXDIST_SERVER_SECONDS`.

    Args:
        server_seconds: How long a closure waits for a server that does not answer.
        server_tries: How often a closure is tried while a server does not answer; None means that
            only the time counts.
        worker_seconds: When all workers have been lost for so long, `join` raises.
        worker_tries: A closure that was running as often as this when a worker was lost fails.
        quiet_seconds: After this time without a finished closure there is a report in the log.
    """

    server_seconds: float = 300.0
    server_tries: int | None = None
    worker_seconds: float = 3600.0
    worker_tries: int = 10
    quiet_seconds: float = 60.0


def read_wait_settings() -> WaitSettings:
    """Return the settings of this process.

    Raises:
        ArgumentError: An environment variable is no number above 0.

    Example:
        >>> from jaxdist._parameter_server.coordinator.settings import read_wait_settings
        >>> read_wait_settings().worker_tries
        10
    """
    return WaitSettings(
        server_seconds=_read("JAXDIST_SERVER_SECONDS", WaitSettings.server_seconds),
        server_tries=int(_read("JAXDIST_SERVER_TRIES", 0.0, whole=True)) or None,
        worker_seconds=_read("JAXDIST_WORKER_SECONDS", WaitSettings.worker_seconds),
        worker_tries=int(_read("JAXDIST_WORKER_TRIES", WaitSettings.worker_tries, whole=True)),
        quiet_seconds=get_settings().quiet_seconds,
    )


def _read(variable: str, default: float, whole: bool = False) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        number = float(int(text)) if whole else float(text)
    except ValueError:
        number = -1.0
    # Written so that nan is refused as well.
    if not number > 0:
        what = "a whole number above 0" if whole else "a time in seconds, above 0"
        raise ArgumentError(
            f"The environment variable {variable} is {show(text)}.\n\nIt is {what}.\n\n"
            f"Set for instance {variable}=60, or unset it."
        )
    return number
