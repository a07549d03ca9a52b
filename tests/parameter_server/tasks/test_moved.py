"""A task that is started again at another address is found there by all others."""

import json
import pathlib

import pytest

from tests.parameter_server.tasks.cluster import make_cluster
from tests.ports import find_free_ports

pytestmark = pytest.mark.slow


def test_a_job_goes_on_with_a_server_and_a_worker_that_have_moved(tmp_path: pathlib.Path) -> None:
    book = tmp_path / "addresses.json"
    book.write_text("{}")
    now: dict[str, str] = {}
    env = {
        "JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path / "snapshots"),
        "JAXDIST_ADDRESSES": str(book),
    }
    with make_cluster("2000", "wait", env=env) as cluster:
        chief = cluster.start_all()
        chief.wait_for("first")
        chief.tell()
        for name in ("worker 1", "ps 0"):
            chief.wait_for("progress")
            cluster.tasks[name].kill()
            job, _, index = name.partition(" ")
            now[cluster.addresses[job][int(index)]] = f"127.0.0.1:{find_free_ports(1)[0]}"
            part = book.with_suffix(".part")
            part.write_text(json.dumps(now))
            part.rename(book)
            cluster.start(name)
        end = chief.wait_for("end")
        assert end["applied"] + end["lost"] == end["scheduled"] == 2000, end
        assert end["count"] == end["applied"], end
        assert all(task.process.poll() is None for task in cluster.tasks.values() if task != chief)
