"""Waiting for the tasks of a cluster, which start at different times."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxdist._parameter_server.transport import Channel
from jaxdist.errors import DeadlineExceededError

_LOG = logging.getLogger("jaxdist")
# A task that imports JAX takes about 3 s.
_FIRST_REPORT_SECONDS = 5.0
_NEXT_REPORT_SECONDS = 60.0


def wait_for_tasks(caller: str, channels: Mapping[str, Channel], seconds: float) -> list[str]:
    """Wait until all tasks answer, and log which of them do not.

    Args:
        caller: Who waits, for the log.
        channels: The channel to each task, by what the log calls it: `ps 0 at 10.0.0.1:7000`.
        seconds: How long to wait at most.

    Returns:
        The tasks that do not answer.
    """
    began, pause = time.monotonic(), _FIRST_REPORT_SECONDS
    with ThreadPoolExecutor(max(1, len(channels)), "jaxdist-join") as threads:
        asked = {threads.submit(_is_ready, c, seconds): name for name, c in channels.items()}
        left: set[Future[bool]] = set(asked)
        while left:
            left = wait(left, timeout=pause).not_done
            if left:
                names = [name for future, name in asked.items() if future in left]
                _LOG.warning(
                    "%s waits for %s since %.0f s, and gives up after %g s (JAXDIST_JOIN_SECONDS).",
                    caller,
                    ", ".join(names),
                    time.monotonic() - began,
                    seconds,
                )
                pause = _NEXT_REPORT_SECONDS
    return [name for future, name in asked.items() if not future.result()]


def _is_ready(channel: Channel, seconds: float) -> bool:
    try:
        channel.wait_until_ready(seconds)
    except DeadlineExceededError:
        return False
    return True
