"""`JAXDIST_CLUSTER` says where the processes of a job are described."""

import pytest

from jaxdist._called import called
from jaxdist._launching.environment import make_environments
from jaxdist._resolve import choose_source, make_resolver
from jaxdist.cluster_resolver import (
    SlurmClusterResolver,
    TFConfigClusterResolver,
    choose_resolver,
    choose_slurm_port,
)
from jaxdist.errors import ClusterError
from tests.strategies.oracle import refused

STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_ID": "33", "SLURM_STEP_ID": "0",
        "JAXDIST_CLUSTER": "slurm"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "JAXDIST_CLUSTER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_without_it_tf_config_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_resolver(), TFConfigClusterResolver)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    monkeypatch.setenv("JAXDIST_CLUSTER", "slurm")
    assert isinstance(choose_resolver(), TFConfigClusterResolver)
    assert choose_source({"JAXDIST_CLUSTER": "slurm", "TF_CONFIG": "{}"}) == "tf_config"


def test_a_step_of_slurm_is_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    resolver = choose_resolver()
    assert isinstance(resolver, SlurmClusterResolver)
    port = choose_slurm_port(STEP)
    cluster = resolver.cluster_spec()
    assert cluster.as_dict() == {"worker": [f"n1:{port}", f"n2:{port}"]}
    # `jaxdist resolve` shows the same.
    assert choose_source(dict(STEP)) == "slurm"
    assert make_resolver("slurm", dict(STEP)).cluster_spec() == cluster


def test_a_restart_and_another_job_get_other_ports() -> None:
    jobs = [{"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": s} for j in (33, 34, 35) for s in "012"]
    ports = {choose_slurm_port(job) for job in jobs}
    assert len(ports) == 9
    assert all(10240 <= port <= 32768 - 64 for port in ports)
    assert choose_slurm_port({}) == 10240


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CLUSTER", "lsf")
    with refused(ClusterError, "JAXDIST_CLUSTER is 'lsf'", "slurm or kubernetes", "srun"):
        choose_resolver()


@called("jaxdist launch")
def test_processes_that_the_launcher_starts_do_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CLUSTER", "slurm")
    (own,) = make_environments([0], 1, [1], "127.0.0.1:2", 1)
    assert "JAXDIST_CLUSTER" not in own
