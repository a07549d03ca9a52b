"""Messages between tasks cost what gRPC costs, and small arrays what large ones cost.

Claim: a push and a pull of 64 MiB by `Channel.call` take at most 1/0.9 of the time of a bare stream
of gRPC, and 100 arrays of 20 kB at most 1.5 times as long as one array of 2 MB.

The bare stream sends the same bytes in the same chunks with the same checksum and the same options,
and copies what it receives into one array. It has no header, no names and no limits. All arms have
one server process. The arrays go there and back in the second comparison.
"""

from collections.abc import Iterator

from benchmarks import _transport
from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need

ROW = "transport"
LARGE = 2**26


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for method in ("push", "pull"):
        arms = {
            "Channel.call": arm(_transport.channel, method=method, size=LARGE),
            "bare stream": arm(_transport.bare, method=method, size=LARGE),
        }
        size = f"{method} 64 MiB"
        race = bench.race(size, arms, 2, devices=1, in_one_process=True, times_rounds=3)
        yield race.line("Channel.call", "bare stream", Need(1 / 0.9))
        yield race.same("bytes", "Channel.call", "bare stream")
    arms = {
        "100 of 20 kB": arm(_transport.channel, method="echo", size=20_000, count=100),
        "1 of 2 MB": arm(_transport.channel, method="echo", size=2_000_000),
    }
    steps = bench.options.steps(20)
    race = bench.race("2 MB, there and back", arms, steps, devices=1, in_one_process=True)
    yield race.line("100 of 20 kB", "1 of 2 MB", Need(1.5))
    yield race.same("bytes", "100 of 20 kB", "1 of 2 MB")
