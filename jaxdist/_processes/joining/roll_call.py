"""Roll call: before JAX's service starts, every process knows that all others have come.

Note [Roll call]
~~~~~~~~~~~~~~~~
`jax.distributed.initialize` ends the process with SIGABRT if another process does not come in time,
so no error can say which one. So each process first answers at its own address of the cluster, and
process 0 asks every address until all have answered. The answers name the task, the cluster and the
versions, so two processes with one index, two clusters or two versions of JAX give a clear error.
Then process 0 frees its port for JAX's service, and all call `initialize`.

The others ask only process 0, which answers whom it still waits for. Its port is free for a moment;
once something there listens that does not answer as jaxdist does, the service has started.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._called import called, name_call
from jaxdist._processes.joining.claims import Answers, Silence, ask
from jaxdist.errors import ClusterError, DuplicateTaskError

_LOG = logging.getLogger("jaxdist")
_SECONDS_BETWEEN_QUESTIONS = 0.1
_SECONDS_UNTIL_LOG = 5.0


class RollCall:
    """Waits until all processes of a cluster have come.

    Args:
        caller: Who joins, for errors.
        addresses: The address of each process.
        me: The answer of this process, from `describe_this_process`.
        claim: The claim that answers at its address.
        seconds: How long to wait.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        me: Mapping[str, Any],
        claim: Answers,
        seconds: float,
    ) -> None:
        self._caller, self._addresses, self._me = name_call(), addresses, me
        self._claim, self._seconds = claim, seconds
        self._start = time.monotonic()
        self._has_logged = False

    @called(lambda self: self._caller)
    def wait_for_all(self) -> None:
        """Ask every process until all have answered; for process 0."""
        missing = {i for i in range(len(self._addresses)) if i != self._me["index"]}
        heard: dict[int, Silence] = {}
        while True:
            for index in sorted(missing):
                said = ask(self._addresses[index])
                if isinstance(said, dict):
                    self._check(index, said)
                    missing.discard(index)
                else:
                    heard[index] = said
            self._claim.say(missing=sorted(missing))
            if not missing:
                return
            self._nap(missing, heard)

    @called(lambda self: self._caller)
    def wait_for_first(self, *, is_service_elsewhere: bool) -> None:
        """Ask process 0 until it has heard from all others; for the other processes."""
        address, missing = self._addresses[0], {0}
        while True:
            said = ask(address)
            if isinstance(said, dict):
                self._check(0, said)
                missing = set(said.get("missing", []))
                if said.get("is_complete"):
                    return
            elif said.is_listening and not is_service_elsewhere:
                return  # JAX's service has the port now.
            self._nap(missing or {0}, {0: said} if isinstance(said, Silence) else {})

    @called(lambda self: self._caller)
    def wait_for_service(self, address: str) -> None:
        """Wait until JAX's service can be reached; for all processes that do not host it.

        `jax.distributed.initialize` ends a process that cannot reach it with SIGABRT.

        Raises:
            ClusterError: The service cannot be reached in time.
        """
        while True:
            said = ask(address)
            if not isinstance(said, Silence) or said.is_listening:
                return
            if time.monotonic() - self._start >= self._seconds:
                raise ClusterError(
                    f"{self._caller}: process {self._me['index']} cannot reach JAX's coordination "
                    f"service at {address}: {said.reason}. It has tried for {self._seconds:.0f} s."
                    "\n\nThe processes of a job meet at that service.\n\n"
                    "Look whether the process that hosts it runs, and let this host reach the port "
                    "in the firewall; or allow more time with JAXDIST_JOIN_SECONDS."
                )
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    def _check(self, index: int, said: Mapping[str, Any]) -> None:
        """Raise if the answer of another process does not fit this process."""
        me, where = self._me, self._addresses[index]
        if said["cluster"] != me["cluster"]:
            raise ClusterError(
                f"{self._caller}: process {me['index']} and the process at {where} have different "
                f"clusters: {list(self._addresses)} here, and {said.get('addresses')} there.\n\n"
                "All processes of a job have the same list of addresses, in the same order.\n\n"
                "Give each process the same cluster (TF_CONFIG); only task.index differs."
            )
        if said["index"] != index:
            raise DuplicateTaskError(
                f"{self._caller}: the process at {where}, the address of task {index}, says that "
                f"it is task {said['index']}.\n\n"
                "Each task of a cluster is one process, with an index of its own.\n\n"
                "Look at task.index in TF_CONFIG of that process."
            )
        names = ("python", "jax", "jaxlib")
        differ = [n for n in names if _get_release(n, said[n]) != _get_release(n, me[n])]
        if differ:
            here = ", ".join(f"{n} {me[n]}" for n in differ)
            there = ", ".join(f"{n} {said[n]}" for n in differ)
            raise ClusterError(
                f"{self._caller}: process {me['index']} has {here}, and process {index} on "
                f"{said['host']} has {there}.\n\n"
                "The processes of a job compile the same programs, so they need the same versions."
                "\n\nInstall the same versions on every machine."
            )

    def _nap(self, missing: set[int], heard: Mapping[int, Silence]) -> None:
        waited = time.monotonic() - self._start
        if waited >= self._seconds:
            raise ClusterError(self._describe_missing(missing, heard, waited))
        if waited >= _SECONDS_UNTIL_LOG and not self._has_logged:
            self._has_logged = True
            _LOG.warning(
                "%s: process %d has waited %.0f s for %s; it waits up to %.0f s (%s).",
                self._caller,
                self._me["index"],
                waited,
                ", ".join(f"process {i} at {self._addresses[i]}" for i in sorted(missing)[:8]),
                self._seconds,
                "JAXDIST_JOIN_SECONDS",
            )
        time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    def _describe_missing(
        self, missing: set[int], heard: Mapping[int, Silence], waited: float
    ) -> str:
        # Process 0 sends only the numbers of those that it still waits for, not why.
        lines = [
            f"  process {i} at {self._addresses[i]}"
            + (f": {heard[i].reason}" if i in heard else "")
            for i in sorted(missing)[:8]
        ]
        return (
            f"{self._caller}: process {self._me['index']} waited {waited:.0f} s for "
            f"{len(missing)} of {len(self._addresses)} processes:\n" + "\n".join(lines) + "\n\n"
            "A job starts when all its processes have joined.\n\n"
            "Start the others, look for their first error, or allow more time with "
            "JAXDIST_JOIN_SECONDS. `jaxdist resolve` shows what a process would do."
        )


def _get_release(name: str, version: str) -> str:
    """Return the part of a version that must agree: major and minor for Python, else all of it."""
    return ".".join(version.split(".")[:2]) if name == "python" else version
