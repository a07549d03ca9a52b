"""Workers with a parameter server in their process, beside TensorFlow and beside workers alone.

Claim: every closure counts, and the net learns. The steps/s of 1 server and 2 workers in one
process, for an MLP of 10 variables (3.3 MB), are at least 1.7 times those of TensorFlow's
`ParameterServerStrategy` whose server and workers are in one process, too. `schedule` of an empty
function takes at most 0.05 of TensorFlow's time; with and without waiting for the results.

Reported: the steps/s beside two threads that compute the same gradients and exchange nothing, which
is the floor; and `schedule` beside `submit` of a thread pool.
"""

from collections.abc import Iterator

from benchmarks import _servers, _tensorflow_servers
from benchmarks._bench import Arm, Bench, arm, tensorflow_arm
from benchmarks._lines import CountLine, Line, Need

ROW = "servers"
OURS, ALONE, THEIRS = "1 server, 2 workers", "2 threads alone", "TensorFlow"


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("servers in one process, beside TensorFlow")
    if skipped:
        yield skipped
    yield from _train(bench, has_tensorflow=not skipped)
    yield from _schedule(bench, has_tensorflow=not skipped)


def _train(bench: Bench, has_tensorflow: bool) -> Iterator[Line]:
    for batch in (256,) if bench.options.is_smoke else (256, 16):
        arms = {
            OURS: arm(_servers.train_with_a_server, batch=batch),
            ALONE: arm(_servers.compute_in_threads, batch=batch),
        }
        if has_tensorflow:
            make = _tensorflow_servers.train
            arms[THEIRS] = tensorflow_arm(make, batch=batch, layer="local")
        size = f"MLP, batch {batch}"
        race = bench.race(size, arms, bench.options.steps(200), devices=2)
        yield race.line(OURS, ALONE, Need())
        if has_tensorflow:
            yield race.line(OURS, THEIRS, Need(1 / 1.7) if batch == 256 else Need())
        for fact, found in race.facts[OURS].items():
            yield CountLine(ROW, size, OURS, "needed", f"{fact}: {found}", f"{fact}: True")
        bench.close(THEIRS)


def _schedule(bench: Bench, has_tensorflow: bool) -> Iterator[Line]:
    for joins in (False, True):
        arms: dict[str, Arm] = {"schedule": arm(_servers.schedule_nothing, joins=joins)}
        if not joins:
            arms["ThreadPoolExecutor.submit"] = arm(_servers.submit_nothing)
        if has_tensorflow:
            make = _tensorflow_servers.schedule_nothing
            arms[THEIRS] = tensorflow_arm(make, layer="local", joins=joins)
        size = "an empty function, " + ("and its result" if joins else "the call alone")
        race = bench.race(size, arms, bench.options.steps(1000), devices=2)
        if not joins:
            yield race.line("schedule", "ThreadPoolExecutor.submit", Need())
        if has_tensorflow:
            yield race.line("schedule", THEIRS, Need(0.05))
