"""Recognizes errors of JAX that come from a collective between processes."""

import re

import jax

_OF_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)
_OF_TIME = re.compile(r"timed out|timeout", re.IGNORECASE)
# An error inside the call that dispatches a program is a ValueError that begins with its status.
_STATUS = re.compile(r"[A-Z_]+: ")


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception says that a collective between processes has failed."""
    text = str(error)
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(text) is not None
    )
    return of_jax and _OF_COLLECTIVE.search(text) is not None


def is_time_limit(error: BaseException) -> bool:
    """Whether an error of a collective says that it timed out."""
    return _OF_TIME.search(str(error)) is not None
