"""Tests the connections that gloo needs, before the first collective.

Note [Pairs of gloo]
~~~~~~~~~~~~~~~~~~~~
Each pair of CPU processes connects to a free port of one of the two. A firewall that passes only
the ports of the cluster drops this connection, and the first collective then waits for minutes
without a message. So each process listens at a free port of its address for gloo, and connects to
others by a plain socket, in the direction that gloo uses: the process with the lower address
listens. In a large job each process tries at most 16 others, near and far. Process 0 collects what
failed and sends the result to all, so that either all processes fail or none.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxdist._called import call_as, name_call
from jaxdist._processes.addresses import format_address, listen
from jaxdist._processes.joining.claims import Answers, ask
from jaxdist._processes.process import Process
from jaxdist._processes.store import Store
from jaxdist.errors import ClusterError

_LOG = logging.getLogger("jaxdist")
_PREFIX = "jaxdist/pairs"
_DISTANCES = 8
# TCP repeats the first packet of a connection after 1, 2 and 4 s.
_MOST_SECONDS = 10.0
# Process 0 sends the result to the others within this time after its own wait has ended.
_SECONDS_FOR_RESULT = 5.0
_SECONDS_UNTIL_STOP = 0.5


def list_partners(index: int, count: int) -> list[int]:
    """Return the processes (at most 16) that a process tries; i lists j if and only if j lists i.

    Example:
        >>> from jaxdist._processes.joining.pairs import list_partners
        >>> list_partners(1, 4)
        [0, 2, 3]
        >>> len(list_partners(0, 501))
        16
    """
    farthest = count // 2
    steps = range(_DISTANCES)
    powers = [round(farthest ** (step / (_DISTANCES - 1))) for step in steps]
    # Small powers may round to the same number; other distances then fill the list.
    distances = list(dict.fromkeys([*powers, *range(1, farthest + 1)]))[:_DISTANCES]
    both = {(index + d) % count for d in distances} | {(index - d) % count for d in distances}
    return sorted(both - {index})


def try_pairs(address: str, process: Process, store: Store, seconds: float) -> None:
    """Connect to other processes as gloo will; see Note [Pairs of gloo].

    Cost:
        One connection to each of at most 16 processes, and four requests to the store for each
        process: 2 ms on one machine with 2 processes. If packets are dropped, 10 s or 80 % of
        `seconds`, whichever is less.

    Args:
        address: The address of this process for gloo.
        process: This process.
        store: The store of the job.
        seconds: How long the processes wait for each other.

    Raises:
        ClusterError: Two processes cannot connect, or one did not come in time.
    """
    if process.count == 1:
        return
    start = time.monotonic()
    end = start + seconds
    server = listen(address, 0)
    if server is None:
        raise ClusterError(
            f"{name_call()}: process {process.index} cannot listen at {address}.\n\n"
            "Collectives between CPU processes (gloo) connect at an address of this machine.\n\n"
            "Write an address of this machine into the cluster. `jaxdist resolve` shows what a "
            "process would use."
        )
    said = {"index": process.index, "host": socket.gethostname(), "address": address}
    said["where"] = format_address(address, server.getsockname()[1])
    answers = Answers(server, said)
    try:
        store.set(f"{_PREFIX}/{process.index}", json.dumps(said), overwrite=True)
        failed = _try_all(said, process, store, end)
        store.set(f"{_PREFIX}/failed/{process.index}", json.dumps(failed), overwrite=True)
        if process.index == 0:
            found = json.dumps(_collect(process.count, store, end))
            store.set(f"{_PREFIX}/result", found, overwrite=True)
        result = store.wait_for(f"{_PREFIX}/result", _left(end) + _SECONDS_FOR_RESULT)
    finally:
        answers.close()
    lines = ["process 0 did not collect the results"] if result is None else json.loads(result)
    if lines:
        more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
        shown = "\n".join(f"  {line}" for line in [*lines[:8], *more])
        raise ClusterError(
            f"{name_call()}: the processes of the job cannot connect to each other:\n{shown}\n\n"
            "Collectives between CPU processes (gloo) connect each process with each other one, at "
            "any free port of these addresses. The ports of the cluster (TF_CONFIG) are not "
            "enough.\n\n"
            "Let the hosts of the job reach all ports of each other in the firewall. `jaxdist "
            "resolve` shows the address that a process would use."
        )
    _LOG.debug("The pairs of gloo were tried in %.3f s.", time.monotonic() - start)


def _try_all(me: Mapping[str, Any], process: Process, store: Store, end: float) -> list[str]:
    """Connect to the partners for which this process is the connecting end; return what failed."""
    seconds = min(_MOST_SECONDS, 0.8 * _left(end))
    stop = threading.Event()

    caller = name_call()

    def connect(other: int) -> str | None:
        text = None
        while text is None and _left(end) and not stop.is_set():
            text = store.wait_for(f"{_PREFIX}/{other}", min(_left(end), _SECONDS_UNTIL_STOP))
        if text is None:
            return f"process {other} did not take part in the test of the connections"
        it: dict[str, Any] = json.loads(text)
        if not _connects(me, it):
            return None
        answer = call_as(caller, ask, it["where"], seconds)
        if isinstance(answer, dict) and answer == it:
            return None
        if isinstance(answer, dict):
            what = f"process {answer.get('index')} on {answer.get('host')} answers there"
        else:
            what = answer.reason
        return (
            f"process {process.index} on {me['host']} ({me['address']}) to process {other} on "
            f"{it['host']} at {it['where']}: {what}"
        )

    partners = list_partners(process.index, process.count)
    with ThreadPoolExecutor(len(partners), thread_name_prefix="jaxdist-pairs") as threads:
        try:
            return [line for line in threads.map(connect, partners) if line]
        finally:
            # After Ctrl-C no thread waits for a process that may not come.
            stop.set()


def _connects(me: Mapping[str, Any], it: Mapping[str, Any]) -> bool:
    """Whether this process is the end that connects, rather than the one that listens."""
    mine, its = _pack(me["address"]), _pack(it["address"])
    # On one host gloo compares ports, which are not known yet: both ends connect.
    return len(mine) != len(its) or mine >= its


def _pack(address: str) -> bytes:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.inet_pton(kind, address.partition("%")[0])


def _collect(count: int, store: Store, end: float) -> list[str]:
    """Return the failures of all processes."""
    lines: list[str] = []
    for index in range(count):
        text = store.wait_for(f"{_PREFIX}/failed/{index}", _left(end))
        lines += [f"process {index} did not come in time"] if text is None else json.loads(text)
    return lines


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
