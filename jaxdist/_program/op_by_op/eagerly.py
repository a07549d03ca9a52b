"""The setting `run_eagerly`: whether steps run op by op instead of compiled."""

import logging
from typing import Any

from jaxdist._called import called
from jaxdist._validate import check_instance

_LOG = logging.getLogger("jaxdist")
# Empty while steps are compiled. `Strategy.run` reads it at every step, and the truth of a shared
# list is the cheapest test whose outcome another module can change.
EAGERLY: list[bool] = []


class RestoreOnExit:
    """The result of `run_eagerly`: a context manager that restores the previous setting."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        _set(self._before)


@called("jaxdist.config.run_eagerly")
def run_eagerly(enabled: bool = True) -> RestoreOnExit:
    """Run steps op by op, with one thread for each replica, for debugging.

    `print` shows values, `breakpoint()` stops in the replica that reaches it, Python code sees
    numbers, and an exception has a note with the number of the replica. The results equal those of
    the compiled program up to rounding. Only the branches that the step takes decide which results
    are equal on all replicas. One replica runs at a time, replica 0 first: each runs until a
    collective, where all replicas meet. Python code runs once for each replica. A merge function is
    traced and runs once for all replicas; if its arguments have different shapes or different
    Python values on some replicas, each replica calls its own. The setting applies to the whole
    process; `jax.disable_jit()` does the same for a block in one thread.

    Steps that are called inside a function that JAX traces (`jax.jit`, `multi_step`) stay
    compiled. Nothing is donated. On CPU all replicas compute on the first device.

    Cost:
        JAX dispatches every operation by itself: milliseconds for a step that takes microseconds
        when compiled, and seconds for the first step, in which JAX compiles each operation.

    Args:
        enabled: Whether to run eagerly from now on.

    Returns:
        A context manager that restores the previous setting at its end.

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
    remedy = "Pass enabled=True or enabled=False."
    check_instance("enabled", enabled, bool, "either True or False", remedy)
    before = bool(EAGERLY)
    _set(enabled)
    return RestoreOnExit(before)


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
    # In place: other modules have imported the list itself.
    EAGERLY[:] = [True] if enabled else []
