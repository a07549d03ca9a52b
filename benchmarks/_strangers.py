"""The arm of a job whose server gets malformed requests while it trains.

`python -m benchmarks._strangers ADDRESS` sends them, between a line `begin` and a line `end`.
"""

import os
import secrets
import sys
import threading
import time
from typing import Any

from benchmarks import _servers
from benchmarks._children import Child
from benchmarks._loop import Loop

_SECRET = "JAXDIST_SECRET"
# Some requests wait half a second for an answer that does not come. So there are several callers,
# each of which sends at most so many in a second; more would measure how fast they are themselves.
CALLERS, MOST = 4, 50
RATE = "requests in a second"


def train(batch: int, strangers: bool) -> Loop:
    """One server and two workers as processes; `strangers` sends requests during each burst."""
    os.environ.setdefault(_SECRET, secrets.token_hex())
    strategy = _servers.make_strategy("grpc")
    [address] = strategy.cluster_resolver.cluster_spec().job_tasks("ps")
    job = _servers.train(strategy, batch)
    if not strangers:
        return job
    child = Child(["-m", "benchmarks._strangers", str(address)])
    child.read()
    sent: list[int] = []
    seconds: list[float] = []

    def count() -> None:
        # Requests that were under way have ended after the burst, which did not wait for them.
        if len(sent) < len(seconds):
            sent.append(int(child.read()))

    def begin(_: int) -> None:
        count()
        child.write("begin")

    def loop(steps: int) -> None:
        began = time.perf_counter()
        job.run(steps)
        seconds.append(time.perf_counter() - began)
        child.write("end")

    def facts() -> dict[str, Any]:
        count()
        rate = sum(sent) / sum(seconds)
        return {**job.facts(), "was asked": rate > 1, RATE: rate}

    return Loop(loop, prepare=begin, facts=facts)


class _Caller:
    """A stranger in a thread, which sends while it is told to."""

    def __init__(self, address: str, seed: int) -> None:
        from tests.parameter_server.transport.stranger import Stranger

        self._stranger = Stranger(address, os.environ[_SECRET], seed)
        self._ends = threading.Event()
        self._thread = threading.Thread()
        self._count = 0

    def begin(self) -> None:
        self._count = 0
        self._ends.clear()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        while not self._ends.wait(1 / MOST):
            self._stranger.ask()
            self._count += 1

    def tell_to_end(self) -> None:
        self._ends.set()

    def count(self) -> int:
        """Wait for its last request, and return how many it has sent."""
        self._thread.join()
        return self._count


def main() -> None:
    """Send while it is told to, and say how many requests that were."""
    callers = [_Caller(sys.argv[1], seed) for seed in range(CALLERS)]
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "begin":
            for caller in callers:
                caller.begin()
        else:
            for caller in callers:
                caller.tell_to_end()
            print(sum(caller.count() for caller in callers), flush=True)


if __name__ == "__main__":
    main()
