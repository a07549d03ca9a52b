"""Jobs of real processes: one parameter server, two workers and a chief."""

import pathlib

import pytest

from tests.parameter_server.tasks.cluster import make_cluster

pytestmark = pytest.mark.slow


def test_every_step_counts_once_and_training_converges() -> None:
    with make_cluster("200") as cluster:
        chief = cluster.start_all()
        end = chief.wait_for("end")
        assert end["count"] == end["scheduled"] == end["applied"] == 200
        assert (end["lost"], end["retried"]) == (0, 0)
        assert end["loss"] < 1e-4
        assert chief.process.wait(60) == 0


def test_a_killed_worker_comes_back_and_its_closure_counts_once() -> None:
    with make_cluster("1500", "wait") as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        chief.tell()
        for _ in range(3):
            cluster.tasks["worker 0"].kill()
            cluster.start("worker 0")
        end = chief.wait_for("end")
        assert end["count"] == end["applied"] == end["scheduled"] == 1500
        assert end["lost"] == 0


def test_a_killed_server_comes_back_from_its_snapshot_and_what_is_lost_is_reported(
    tmp_path: pathlib.Path,
) -> None:
    env = {"JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with make_cluster("2000", "wait", env=env) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        chief.tell()
        for _ in range(2):
            chief.wait_for("progress")
            cluster.tasks["ps 0"].kill()
            cluster.start("ps 0")
        end = chief.wait_for("end")
        assert end["applied"] + end["lost"] == end["scheduled"] == 2000, end
        assert end["count"] == end["applied"], end
        assert end["lost"] > 0, end


def test_a_task_with_another_secret_is_named() -> None:
    with make_cluster("10", workers=1) as cluster:
        cluster.start("ps 0")
        cluster.start("worker 0", {"JAXDIST_SECRET": "another secret, as long as the first"})
        said = cluster.start("chief 0").wait(120)
        assert "UnauthenticatedError: worker 0 at 127.0.0.1" in said


def test_tasks_that_are_missing_are_named() -> None:
    with make_cluster("10", env={"JAXDIST_JOIN_SECONDS": "2"}) as cluster:
        said = cluster.start("chief 0").wait(120)
        assert "waited 2 s, and 3 of 3 tasks do not answer" in said
        for job, addresses in cluster.addresses.items():
            assert job == "chief" or f"{job} 0 at {addresses[0]}" in said


def test_a_server_without_snapshots_that_was_started_again_is_an_error() -> None:
    with make_cluster("3000", "wait", workers=1) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        cluster.tasks["ps 0"].kill()
        cluster.start("ps 0")
        chief.tell()
        said = chief.wait(120)
        assert "was started again, and has no variables" in said
        assert "snapshot_directory=" in said
