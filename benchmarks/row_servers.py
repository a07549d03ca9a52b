"""Workers with a parameter server in their process, beside workers that exchange nothing.

Claim: every closure counts, and the net learns. Reported: the steps/s of 1 server and 2 workers in
one process, for an MLP of 10 variables (3.3 MB), beside two threads that compute the same gradients
and exchange nothing, which is the floor; and the time of one call of `schedule` with an empty
function, beside `submit` of a thread pool.
"""

from collections.abc import Iterator

from benchmarks import _servers
from benchmarks._bench import Bench, arm
from benchmarks._lines import CountLine, Line, Need

ROW = "servers"


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for batch in bench.options.sizes(256, full=(256, 16)):
        arms = {
            "1 server, 2 workers": arm(_servers.train_with_a_server, batch=batch),
            "2 threads alone": arm(_servers.compute_in_threads, batch=batch),
        }
        steps = bench.options.steps(200)
        size = f"MLP, batch {batch}"
        race = bench.race(size, arms, steps, devices=2, in_one_process=True)
        yield race.line("1 server, 2 workers", "2 threads alone", Need())
        for fact, found in race.facts["1 server, 2 workers"].items():
            if fact.startswith("has "):
                arm_is, must_be = f"{fact}: {found}", f"{fact}: True"
                yield CountLine(ROW, size, "1 server, 2 workers", "needed", arm_is, must_be)
    arms = {
        "schedule": arm(_servers.schedule_nothing),
        "ThreadPoolExecutor.submit": arm(_servers.submit_nothing),
    }
    steps = bench.options.steps(1000)
    race = bench.race("an empty function", arms, steps, devices=2, in_one_process=True)
    yield race.line("schedule", "ThreadPoolExecutor.submit", Need())
