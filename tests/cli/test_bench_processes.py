"""`jaxdist bench collectives` in the processes of a job."""

import json
import pathlib

import pytest

from jaxdist.cli import main
from tests.launching.launcher import run_launcher


@pytest.mark.slow
def test_all_processes_measure_and_one_of_them_says_what_they_found(
    tmp_path: pathlib.Path,
) -> None:
    saved = tmp_path / "links.json"
    how = ("-m", "jaxdist", "bench", "collectives", "--rounds", "2")
    outcome = run_launcher(
        "-n", "2", *how, "--sizes", "4KiB", "64KiB", "--save", str(saved), timeout=100
    )
    assert outcome.exit_code == 0, outcome.describe()
    assert outcome.stdout.count("All-reduces") == 1
    links = json.loads(saved.read_text())
    assert links["num_devices"] == 2
    assert links["links"][0]["name"] == "cpu-processes"
    assert "2 process(es)" in links["links"][0]["source"]


def test_devices_are_not_chosen_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster | {"task": {"type": "worker", "index": 0}}))
    assert main(["bench", "collectives", "--devices", "2"]) == 2
