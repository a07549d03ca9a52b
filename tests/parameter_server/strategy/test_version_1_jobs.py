"""Jobs of real processes with `ParameterServerStrategy` of version 1."""

import pathlib

import pytest

from tests.parameter_server.tasks.cluster import make_cluster

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("version_1_script.py")


def test_all_steps_of_all_workers_count() -> None:
    steps = 100
    with make_cluster(str(steps), script=SCRIPT, ps=2, workers=2) as cluster:
        cluster.start_all()
        workers = [t for name, t in cluster.tasks.items() if not name.startswith("ps")]
        for worker in workers:
            end = worker.wait_for("end")
            assert (end["x"], end["z"]) == (10 + 3 * steps, 30 + 3 * steps)
            # Each step of each worker takes about 2 % of the error away.
            assert end["error"] < 7 * 0.98 ** (2 * steps)
            assert end["parameter_devices"] == ["/job:ps/task:0", "/job:ps/task:1"]
            assert worker.process.wait(60) == 0


def test_a_worker_that_is_killed_does_not_stop_the_others() -> None:
    with make_cluster("400", "wait", script=SCRIPT, workers=1) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        cluster.tasks["worker 0"].wait_for("first")
        cluster.tasks["worker 0"].kill()
        chief.tell()
        end = chief.wait_for("end")
        # The first step of the worker, and all of the chief.
        assert (end["x"], end["z"]) == (10 + 401, 30 + 401)
        # It comes back, and finds the variables as they are.
        again = cluster.start("worker 0")
        again.wait_for("first")
        again.tell()
        assert again.wait_for("end")["z"] == 30 + 801


def test_a_killed_server_comes_back_and_a_step_waits_for_it(tmp_path: pathlib.Path) -> None:
    env = {"JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with make_cluster("1500", "wait", script=SCRIPT, workers=1, env=env) as cluster:
        cluster.start("ps 0")
        chief = cluster.start("chief 0")
        chief.wait_for("first")
        chief.tell()
        chief.wait_for("progress")
        cluster.tasks["ps 0"].kill()
        cluster.start("ps 0")
        end = chief.wait_for("end")
        # What was lost came after the last snapshot, and both variables are from the same one.
        assert 30 < end["z"] <= 30 + 1500
        assert end["x"] - 10 == end["z"] - 30


def test_servers_that_are_missing_are_named() -> None:
    with make_cluster("10", script=SCRIPT, env={"JAXDIST_JOIN_SECONDS": "2"}) as cluster:
        said = cluster.start("chief 0").wait(120)
        assert "chief 0 waited 2 s (JAXDIST_JOIN_SECONDS), and ps 0 at 127.0.0.1" in said


def test_another_task_at_the_address_of_a_server_is_named() -> None:
    with make_cluster("10", script=SCRIPT, ps=2) as cluster:
        cluster.start("ps 0")
        cluster.start("ps 1")
        cluster.addresses["ps"].reverse()
        assert "ClusterError" in cluster.start("chief 0").wait(120)
