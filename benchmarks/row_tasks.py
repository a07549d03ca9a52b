"""A parameter server and its workers as processes, beside a loop of gRPC by hand.

Claim: 1 server and 2 workers that train an MLP of 10 variables (3.3 MB) take at least 0.9 of the
steps/s of the same processes with one exchange of gRPC by hand, which has the same bytes, chunks
and checksum; at batch 256, and at batch 16, where the exchange is all. A closure that reads and
changes 100 variables (2 MB there and back) takes at most 0.6 of TensorFlow's time, and `schedule`
of an empty function at most 0.5; with and without waiting for the results.

Reported: the steps/s beside two processes that exchange nothing, and beside TensorFlow.

The CPU column has the process of the coordinator only.
"""

from collections.abc import Iterator

from benchmarks import _raw_tasks, _servers, _tensorflow_servers
from benchmarks._bench import Arm, Bench, arm, tensorflow_arm
from benchmarks._lines import CountLine, Line, Need

ROW = "tasks"
OURS, RAW, ALONE, THEIRS = "1 server, 2 workers", "gRPC by hand", "2 alone", "TensorFlow"


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("servers and workers as processes, beside TensorFlow")
    if skipped:
        yield skipped
    yield from _train(bench, has_tensorflow=not skipped)
    yield from _move(bench, has_tensorflow=not skipped)
    if not skipped:
        yield from _schedule(bench)


def _train(bench: Bench, has_tensorflow: bool) -> Iterator[Line]:
    for batch in (16,) if bench.options.is_smoke else (256, 16):
        arms = {
            OURS: arm(_servers.train_with_a_server, batch=batch, layer="grpc"),
            RAW: arm(_raw_tasks.train, batch=batch),
            ALONE: arm(_raw_tasks.train_alone, batch=batch),
        }
        if has_tensorflow:
            make = _tensorflow_servers.train
            arms[THEIRS] = tensorflow_arm(make, batch=batch, layer="grpc")
        size = f"MLP, batch {batch}"
        # Bursts of half a second: the other work of a machine comes and goes.
        steps = bench.options.steps(20 if batch == 256 else 40)
        race = bench.race(size, arms, steps, devices=1, times_rounds=3)
        yield race.line(OURS, RAW, Need(1 / 0.9))
        for other in list(arms)[2:]:
            yield race.line(OURS, other, Need())
        for label in (OURS, RAW):
            for fact, found in race.facts[label].items():
                yield CountLine(ROW, size, label, "needed", f"{fact}: {found}", f"{fact}: True")
        bench.close()


def _move(bench: Bench, has_tensorflow: bool) -> Iterator[Line]:
    arms = {
        OURS: arm(_servers.move_many, layer="grpc"),
        RAW: arm(_raw_tasks.move_many),
    }
    if has_tensorflow:
        arms[THEIRS] = tensorflow_arm(_tensorflow_servers.move_many, layer="grpc")
    size = "100 variables, 2 MB"
    race = bench.race(size, arms, bench.options.steps(20), devices=1, times_rounds=3)
    yield race.line(OURS, RAW, Need())
    if has_tensorflow:
        yield race.line(OURS, THEIRS, Need(0.6))
    for fact, found in race.facts[OURS].items():
        yield CountLine(ROW, size, OURS, "needed", f"{fact}: {found}", f"{fact}: True")
    bench.close()


def _schedule(bench: Bench) -> Iterator[Line]:
    for joins in (False, True):
        make = _tensorflow_servers.schedule_nothing
        arms: dict[str, Arm] = {
            "schedule": arm(_servers.schedule_nothing, layer="grpc", joins=joins),
            THEIRS: tensorflow_arm(make, layer="grpc", joins=joins),
        }
        size = "an empty function, " + ("and its result" if joins else "the call alone")
        race = bench.race(size, arms, bench.options.steps(200), devices=1)
        yield race.line("schedule", THEIRS, Need(0.5))
        bench.close()
