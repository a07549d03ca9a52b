"""A chief whose dataset function is of several kinds; the others run `job_script.py`."""

import sys

import jaxdist
from jaxdist import ParameterServerStrategy
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator
from tests.parameter_server.tasks import datasets


def main(kind: str) -> None:
    """Schedule one function, and print its result or its error."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        modules = ["tests.parameter_server.tasks.datasets"] if kind == "module" else []
        cluster, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        jaxdist.Server(cluster, job, index, modules=modules).join()
        return
    kinds = {
        "lambda": lambda: datasets.count_up(),
        "module": datasets.count_up,
        "late": late,
        "fails": fail,
        "ends": datasets.count_to_three,
    }
    coordinator = ClusterCoordinator(ParameterServerStrategy(resolver))
    try:
        iterator = iter(coordinator.create_per_worker_dataset(kinds[kind]))
        for _ in range(5):
            found = coordinator.schedule(lambda it: next(it) + 1, args=(iterator,)).fetch()
        print("result", float(found))
    except Exception as error:
        print(type(error).__name__, error)


def fail() -> None:
    """Raise."""
    raise OSError("no such file: train.csv")


count_up, count_to_three = datasets.count_up, datasets.count_to_three
if sys.argv[1:2] == ["module"]:
    # The worker knows it by its own module only.
    del count_up


if __name__ == "__main__":
    if TFConfigClusterResolver().task_type == "chief":

        def late():
            """Be defined on the chief only."""
            return datasets.count_up()

    else:
        late = None
    main(sys.argv[1])
