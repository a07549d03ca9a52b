"""Whether steps run op by op instead of compiled."""

import logging
from typing import Any

from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError

_LOG = logging.getLogger("jaxdist")
# Empty while steps are compiled: `Strategy.run` asks at every step.
EAGERLY: list[bool] = []


class Restores:
    """What `run_eagerly` returns: as a context manager it brings the former setting back."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        _set(self._before)


def run_eagerly(enabled: bool = True) -> Restores:
    """Run steps op by op, one thread for each replica, to look into them.

    `print` shows values, `breakpoint()` stops in the replica that reaches it, Python code sees
    numbers, and an exception has a note with the replica's number. Results are those of the
    compiled program up to rounding; which of them are equal is decided by the branches that are
    taken. Replicas take turns, the first one first: each runs until a collective, where all meet.
    Python code runs once for each replica; a merge function runs once for all of them, and is
    traced (where its arguments have other shapes, or other Python values, on some replicas, each
    calls its own). The setting is for the whole process; `jax.disable_jit()` does the same for a
    block in one thread.

    Steps that are called inside a function that JAX traces (`jax.jit`, `multi_step`) stay
    compiled, and nothing is donated. On CPU all replicas compute on the first device.

    Cost:
        Every operation is dispatched by itself: milliseconds for a step that takes microseconds
        compiled, and seconds for the first one, in which each operation is compiled.

    Args:
        enabled: Whether to run eagerly from now on.

    Returns:
        Something that can be used in a `with` statement, at the end of which the setting is as it
        was before.

    Raises:
        ArgumentTypeError: `enabled` is not a boolean.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     print(f"x is {x}")
        ...     return get_replica_context().all_reduce("sum", x)
        >>> with jaxdist.config.run_eagerly():
        ...     total = strategy.run(step, (PerReplica([1.0, 2.0]),))
        x is 1.0
        x is 2.0
        >>> float(total)
        3.0

    Source:
        `tf.config.run_functions_eagerly`.
    """
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(
            f"jaxdist.config.run_eagerly was given enabled={show(enabled)}.\n\n"
            "enabled is either True or False.\n\nPass enabled=True or enabled=False."
        )
    before = bool(EAGERLY)
    _set(enabled)
    return Restores(before)


def steps_run_eagerly() -> bool:
    """Whether steps run op by op now.

    Example:
        >>> jaxdist.config.steps_run_eagerly()
        False

    Source:
        `tf.config.functions_run_eagerly`.
    """
    return bool(EAGERLY)


def _set(enabled: bool) -> None:
    if enabled and not EAGERLY:
        _LOG.info("steps run op by op from now on; nothing that they are given is donated")
    EAGERLY[:] = [True] if enabled else []
