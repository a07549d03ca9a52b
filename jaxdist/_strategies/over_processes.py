"""Strategies in jobs of several processes: checks, reports of calls, and time limits."""

import collections
import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _checkpoints, _processes, cluster_resolver
from jaxdist._called import called, name_call, refuse
from jaxdist._cluster import find_task
from jaxdist._compat import is_concrete, is_ready
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import LaterCalls
from jaxdist.errors import JaxdistError, OtherProcessError, SeveralProcessesError

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
        """Set the time limit of one step, which the options of its collectives ask for.

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
        name = getattr(fn, "__name__", type(fn).__name__)
        shown = f"strategy.run({name})"
        self._later.add(name, args, kwargs, self._layout)
        own = self._limits.get(fn) if self._limits else None
        seconds = own if seconds is None else seconds if own is None else min(own, seconds)
        _checkpoints.keep_states()
        waiter = _processes.Waiter(shown, shown, seconds, self._steps)
        return self._call(waiter, functools.partial(call, *args, **(kwargs or {})), seconds)

    def _call(
        self, waiter: "_processes.Waiter", call: Callable[[], Any], seconds: float | None
    ) -> Any:
        """Keep one array of the result of a call; with `seconds`, wait for all of them."""
        try:
            with waiter:
                result = call()
                arrays = list(filter(is_concrete, jax.tree.leaves(result)))
                if arrays:
                    self._results.append(min(arrays, key=lambda array: array.nbytes))
                if seconds is not None:
                    waiter.wait(arrays)
        except OtherProcessError as error:
            _checkpoints.save_after(error)
            raise
        return result

    def combine(self, name: str, call: Callable[[], Any], seconds: float | None) -> Any:
        """Run `reduce` or `gather`; with `seconds`, wait until it has ended.

        Raises:
            DeadlineExceededError: `seconds` have passed.
            UnavailableError: Another process has ended.
        """
        self._later.note(name)
        place = self._calls.setdefault(name, _processes.CallOfAll(name)).name_next()
        return self._call(_processes.Waiter(name, place, seconds), call, seconds)


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


_INSTEAD = "Make a MultiWorkerMirroredStrategy, which trains with all processes; "


def check_one_process(layout: ReplicaMesh, *, were_chosen: bool) -> None:
    """Raise an error for a strategy of one process that may be meant for all processes.

    Args:
        layout: The mesh of the strategy.
        were_chosen: Whether the user named the devices.

    Raises:
        SeveralProcessesError: Devices of other processes, or default devices.
    """
    # A described slice runs nothing, so it may be planned in any process.
    me, count = layout.process.index, layout.process.count
    if layout.described is not None:
        return
    if count == 1:
        if not were_chosen:
            _warn_if_not_joined()
        return
    others = sorted({*layout.device_owners.values()} - {me})
    if others:
        raise refuse(
            f"devices of process(es) {others}, and this is process {me} of {count}.",
            f"{name_call()} works on the devices of one process: datasets, variables and values "
            "that each process makes for itself would differ between them.",
            f"{_INSTEAD}or, for a strategy of this process alone, its own devices: "
            f"{_format_own_devices()}.",
            kind=SeveralProcessesError,
        )
    # With default devices, every process would train its own model without an error.
    if not were_chosen:
        raise SeveralProcessesError(
            f"{name_call()}() was made in process {me} of a job of {count} processes, and works "
            f"on the devices of this process alone.\n\nEach of the {count} processes would train "
            f"its own model, without the batches of the others.\n\n{_INSTEAD}or, where each "
            f"process is meant to work on its own, its devices by name: {_format_own_devices()}."
        )
    warn_if_alone(layout)


def warn_if_alone(layout: ReplicaMesh) -> None:
    """Log a warning if the job has other processes: the strategy does not communicate with them."""
    caller = name_call()
    process = layout.process
    if process.count > 1:
        _LOG.warning(
            "%s in process %d of a job of %d processes works on the devices of this process "
            "alone: nothing is exchanged with the others, and each process trains a model of its "
            "own.",
            caller,
            process.index,
            process.count,
        )


def _warn_if_not_joined() -> None:
    """Log a warning in a task of a cluster whose processes have not been joined."""
    caller = name_call()
    try:
        # A copy: the resolver of Slurm sets the GPUs of its task.
        environ = dict(os.environ)
        source = cluster_resolver.find_source(environ)
        task = find_task(cluster_resolver.choose_resolver(environ))
    except JaxdistError:
        # This strategy does not use the cluster, so its errors do not matter here.
        return
    if not task.is_alone and "ps" not in task.counts:
        _LOG.warning(
            "%s() in the task %s %d of a cluster of %d processes (%s) works on the devices of "
            "this process alone: each process trains a model of its own. "
            "MultiWorkerMirroredStrategy() trains with all of them; devices by name, %s, avoid "
            "this message.",
            caller,
            task.job,
            task.index,
            len(task.training),
            source.because,
            _format_own_devices(),
        )


def _format_own_devices() -> str:
    caller = name_call()
    one = caller == "OneDeviceStrategy"
    return f"{caller}(jax.local_devices(){'[0]' if one else ''})"
