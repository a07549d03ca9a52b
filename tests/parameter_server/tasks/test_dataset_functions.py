"""Dataset functions of workers that are other processes: found by name, or a named error."""

import pathlib

import pytest

from tests.parameter_server.tasks.cluster import make_cluster

_SCRIPT = pathlib.Path(__file__).with_name("dataset_script.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("module", "result 5.0"),
        ("lambda", "ArgumentError ClusterCoordinator.create_per_worker_dataset was given"),
        ("late", "__main__:late: it is not defined above the line that starts jaxdist.Server"),
        ("fails", "no such file: train.csv"),
        ("ends", "OutOfRangeError"),
    ],
)
def test_a_dataset_function_is_found_by_its_name_or_named(kind: str, said: str) -> None:
    with make_cluster(kind, script=_SCRIPT, workers=1) as cluster:
        assert said in cluster.start_all().wait(120)
