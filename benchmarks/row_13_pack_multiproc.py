"""Between CPU processes small leaves travel together.

Claim: an all-reduce of 100 leaves of 4 KiB between 2 processes, of 1 device and of 2 devices each,
takes at most 0.12 of the time of leaf by leaf, and between processes of 1 device at most 0.75 of
that of TensorFlow's `MultiWorkerMirroredStrategy` with its default packing. What is packed is
decided from the latency and bandwidth fitted between these processes just before.
"""

from collections.abc import Iterator

from benchmarks import _sums, _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._lines import Line, Need
from benchmarks._links import fitted_between

ROW = "13"
PROCESSES = 2


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("100 x 4 KiB between processes against TensorFlow's")
    shapes = [(1024,)] * (10 if bench.options.is_smoke else 100)
    for devices in (1,) if bench.options.is_smoke else (1, 2):
        links = fitted_between(bench, PROCESSES, devices)
        yield links.note(ROW)
        arms = {
            "all_reduce": arm(
                _sums.api_joined, processes=PROCESSES, shapes=shapes, links=links.path
            ),
            "psum of the list": arm(_sums.per_leaf_joined, processes=PROCESSES, shapes=shapes),
        }
        # Without a GPU a worker of TensorFlow has one device.
        with_tensorflow = not skipped and devices == 1
        if with_tensorflow:
            arms["tf all_reduce"] = tensorflow_arm(
                _tensorflow.workers_all_reduce, processes=PROCESSES, shapes=shapes
            )
        size = f"{len(shapes)} x 4 KiB, 2 processes x {devices}"
        race = bench.race(size, arms, bench.options.steps(20), devices=devices)
        yield race.line("all_reduce", "psum of the list", Need(0.12))
        yield race.same("sum", "all_reduce", "psum of the list")
        if with_tensorflow:
            yield race.line("all_reduce", "tf all_reduce", Need(0.75))
            yield race.same("sum", "all_reduce", "tf all_reduce")
        bench.close()
    if skipped:
        yield skipped
