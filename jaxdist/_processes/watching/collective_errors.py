"""Which errors of JAX come from a collective between processes."""

import re

_OF_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)
_OF_TIME = re.compile(r"timed out|timeout", re.IGNORECASE)


def is_collective_error(error: BaseException) -> bool:
    """Whether an error of JAX says that a collective between processes has failed."""
    return _OF_COLLECTIVE.search(str(error)) is not None


def is_time_limit(error: BaseException) -> bool:
    """Whether an error of a collective says that its time was over."""
    return _OF_TIME.search(str(error)) is not None
