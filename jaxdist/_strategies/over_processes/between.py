"""Reports calls of a strategy to the other processes, and limits how long the calls wait."""

import collections
import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _checkpoints, _processes
from jaxdist._called import called, refuse
from jaxdist._compat import is_ready
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import LaterCalls
from jaxdist.errors import OtherProcessError

_LOG = logging.getLogger("jaxdist")
# More than jaxdist lets a loop have in flight.
_MOST_IN_FLIGHT = 16
_NAP_SECONDS = 0.001


class BetweenProcesses:
    """Reports calls of this process to the other processes, and limits how long it waits for them.

    Args:
        layout: The mesh of the strategy, which other processes share.
    """

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout
        self._steps = 0
        self._later = LaterCalls()
        self._calls: dict[str, _processes.CallOfAll] = {}
        # A result of each of the last calls; see `_finish`.
        self._results: collections.deque[Any] = collections.deque(maxlen=_MOST_IN_FLIGHT)
        own = weakref.ref(self)
        _processes.at_leaving(lambda: _finish(own()))
        self._limits: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    @called("all_reduce")
    def limit(self, fn: Any, seconds: float) -> None:
        """Set the time limit of one step, which tracing found in the options of its collectives.

        Raises:
            ArgumentError: `seconds` is larger than XLA's own limit.
        """
        check_limit(seconds)
        with contextlib.suppress(TypeError):  # `fn` does not support weak references
            self._limits[fn] = seconds

    def run(
        self,
        call: Callable[..., Any],
        fn: Any,
        name: str,
        args: Any,
        kwargs: Any,
        seconds: float | None,
    ) -> Any:
        """Run a step; with `seconds`, wait until it has ended.

        Raises:
            DeadlineExceededError: `seconds` have passed.
            UnavailableError: Another process has ended.
        """
        self._steps += 1
        shown = f"strategy.run({name})"
        self._later.add(name, args, kwargs, self._layout)
        own = self._limits.get(fn) if self._limits else None
        seconds = own if seconds is None else seconds if own is None else min(own, seconds)
        _checkpoints.keep_states()
        try:
            with _processes.Waiter(shown, shown, seconds, self._steps) as waiter:
                result = call(*args, **kwargs) if kwargs else call(*args)
                self._wait(waiter, result, seconds)
        except OtherProcessError as error:
            _checkpoints.save_after(error)
            raise
        return result

    def _wait(self, waiter: "_processes.Waiter", result: Any, seconds: float | None) -> None:
        """Keep one array of a result; with `seconds`, wait for all of them."""
        arrays = _list_arrays(result)
        if arrays:
            self._results.append(min(arrays, key=_count_bytes))
        if seconds is not None:
            waiter.wait(arrays)

    def combine(self, name: str, call: Callable[[], Any], seconds: float | None) -> Any:
        """Run `reduce` or `gather`; with `seconds`, wait until it has ended.

        Raises:
            DeadlineExceededError: `seconds` have passed.
            UnavailableError: Another process has ended.
        """
        self._later.note(name)
        place = self._calls.setdefault(name, _processes.CallOfAll(name)).name_next()
        try:
            with _processes.Waiter(name, place, seconds) as waiter:
                result = call()
                self._wait(waiter, result, seconds)
        except OtherProcessError as error:
            _checkpoints.save_after(error)
            raise
        return result


def _finish(between: BetweenProcesses | None) -> None:
    """Wait for the last calls before this process leaves the job.

    If a collective still runs when the interpreter ends, the process crashes with SIGSEGV although
    its program has ended. Collectives that wait for a missing process are abandoned after
    `quiet_seconds`.
    """
    arrays: list[Any] = [] if between is None else list(between._results)
    end = time.monotonic() + _processes.get_settings().quiet_seconds
    for array in [*arrays, *jax.live_arrays()]:
        while not array.is_deleted() and not is_ready(array):
            if time.monotonic() >= end:
                _LOG.warning(
                    "This process leaves the others while a collective still waits for one of them."
                )
                return
            time.sleep(_NAP_SECONDS)


def _count_bytes(array: jax.Array) -> int:
    return array.nbytes


def check_limit(seconds: float | None) -> None:
    """Raise for a time limit that XLA's own limit would cut short."""
    most = _processes.get_settings().collective_seconds
    if seconds is not None and seconds > most:
        raise refuse(
            f"timeout_seconds={seconds:g}, and collectives of this job end after {most:g} s.",
            "XLA has one limit for all collectives, which is set when the processes join.",
            f"Pass at most {most:g}, or set JAXDIST_COLLECTIVE_SECONDS={seconds:g} for all "
            "processes.",
        )


def _list_arrays(tree: Any) -> list[Any]:
    return [
        x
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
