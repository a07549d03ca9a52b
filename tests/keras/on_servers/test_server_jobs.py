"""Jobs of real processes that train a Keras model on parameter servers."""

import pathlib

import pytest

from tests.parameter_server.tasks.cluster import make_cluster

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("server_script.py")
STEPS = 20  # of an epoch


def test_fit_goes_on_when_a_worker_is_killed_and_each_step_counts_once() -> None:
    with make_cluster("2", "5", script=SCRIPT, ps=2, workers=2) as cluster:
        chief = cluster.start_all()
        chief.wait_for("under way")
        cluster.tasks["worker 0"].kill()
        chief.tell()
        counted = chief.wait_for("counted")
        end = chief.wait_for("end")
        # Ten batches of 32 rows are evaluated.
        assert counted["applied"] == counted["scheduled"] == 5 * STEPS + 10
        assert counted["lost"] == 0
        assert end["steps"] == 5 * STEPS
        assert end["loss"] < 0.7 * end["first"]
        assert end["accuracy"] == pytest.approx(end["own"], abs=1e-6)
        assert chief.process.wait(60) == 0


@pytest.mark.timeout(300)
def test_fit_goes_on_when_a_server_is_killed_and_what_it_has_lost_is_counted(
    tmp_path: pathlib.Path,
) -> None:
    env = {"JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with make_cluster("2", "10", script=SCRIPT, ps=2, workers=2, env=env) as cluster:
        chief = cluster.start_all()
        chief.wait_for("under way")
        cluster.tasks["ps 0"].kill()
        cluster.start("ps 0")
        chief.tell()
        counted = chief.wait_for("counted")
        end = chief.wait_for("end")
        # Ten batches of 32 rows are evaluated.
        assert counted["scheduled"] == 10 * STEPS + 10
        assert counted["applied"] + counted["lost"] == counted["scheduled"], counted
        # Its snapshot is older than the first step.
        assert counted["lost"] > 0
        assert 10 * STEPS - counted["lost"] <= end["steps"] <= 10 * STEPS
        assert end["finite"]
        assert end["loss"] < 0.7 * end["first"]
        assert end["accuracy"] == pytest.approx(end["own"], abs=1e-6)
        assert chief.process.wait(60) == 0


def test_each_worker_of_version_1_trains_the_model_of_the_servers() -> None:
    with make_cluster("1", "4", script=SCRIPT, ps=1, workers=1) as cluster:
        tasks = [cluster.start_all(), cluster.tasks["worker 0"]]
        for task in tasks:
            task.wait_for("under way")
            task.tell()
        ends = [task.wait_for("end") for task in tasks]
        assert max(end["steps"] for end in ends) == 2 * 4 * STEPS
        for task, end in zip(tasks, ends, strict=True):
            assert end["loss"] < 0.7 * end["first"]
            assert task.process.wait(60) == 0
