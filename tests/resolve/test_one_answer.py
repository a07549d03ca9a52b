"""`jaxdist resolve`, strategies, tasks and Estimator agree on the cluster of a process."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping

import pytest

import jaxdist
from jaxdist import estimator, jobs
from jaxdist._resolve import Network, choose_source, make_report, make_resolver
from jaxdist._strategies import multi_worker
from jaxdist.cluster_resolver import describe_unused_sign, find_source
from jaxdist.errors import ClusterError
from tests.strategies.oracle import refused
from tests.tables import sampled

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "localhost",
}
STEP = {**SLURM, "SLURM_STEP_ID": "0"}
# What starts the process: the variables that it sets, and the number of processes of the cluster.
STARTED_BY: dict[str, tuple[dict[str, str], int]] = {
    "nothing": ({}, 1),
    "srun -n 2": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
        2,
    ),
    "srun -n 1": (
        {
            **STEP,
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
        },
        1,
    ),
    "sbatch": (SLURM, 1),
    "salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, 1),
    "a TPU pod": ({"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_WORKER_ID": "1"}, 2),
    "a TPU pod, addresses": ({"TPU_PROCESS_ADDRESSES": "h0:1,h1:1", "CLOUD_TPU_TASK_ID": "1"}, 2),
    "a TPU host": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 1),
    "an indexed Job": ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, 1),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 1),
    "SkyPilot": ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, 1),
    "torchrun": ({"WORLD_SIZE": "2", "RANK": "1"}, 1),
}
WITH_A_SIGN = {"an indexed Job", "mpirun", "SkyPilot", "torchrun"}
TASKS = (None, ("worker", 1), ("chief", 0), ("evaluator", 0), ("ps", 0))
CHOSEN = (None, "none")
TABLE = list(itertools.product(STARTED_BY, TASKS, CHOSEN))


def _make_environ(
    started_by: str, task: tuple[str, int] | None, chosen: str | None
) -> tuple[dict[str, str], int, int | None]:
    """Return the variables, the number of processes that train together, and which this one is."""
    variables, count = STARTED_BY[started_by]
    environ = dict(variables)
    index: int | None = 1 if count > 1 else None
    if chosen:
        environ["JAXDIST_CLUSTER"] = chosen
        count, index = 1, None
    if task is not None:
        cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
        own = {"type": task[0], "index": task[1]}
        environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": own})
        count, index = 3, {("chief", 0): 0, ("worker", 1): 2}.get(task)
    return environ, count, index


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, _ in STARTED_BY.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    for name in ("TF_CONFIG", "JAXDIST_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


def _join(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int | None] | str:
    """Return what a strategy would join: the number of processes, and which this one is."""
    joined: list[tuple[int, int]] = []

    class StoppedError(Exception):
        """Ends the constructor before it waits for others."""

    def join(addresses: list[str], index: int) -> None:
        joined.append((len(addresses), index))
        raise StoppedError

    monkeypatch.setattr(multi_worker._processes, "join", join)
    try:
        jaxdist.MultiWorkerMirroredStrategy()
    except StoppedError:
        return joined[0]
    except ClusterError as error:
        return str(error)
    return 1, None


class _Unreached(Network):
    """No name has an address, and nothing is asked."""

    def find_addresses(self, host: str) -> tuple[str, ...]:
        return ("192.0.2.1",)

    def is_own(self, host: str) -> bool:
        return True

    def is_used(self, host: str, port: int) -> bool:
        return False


@pytest.mark.parametrize("row", sampled(TABLE, 40))
def test_all_give_one_answer(
    monkeypatch: pytest.MonkeyPatch, row: tuple[str, tuple[str, int] | None, str | None]
) -> None:
    started_by, task, chosen = row
    environ, count, index = _make_environ(started_by, task, chosen)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = _join(monkeypatch)
    if task is not None and task[0] == "ps":
        assert isinstance(found, str)
        assert "'ps' 0" in found
    else:
        assert found == ((count, index) if index is not None else (1, None))

    source = choose_source(environ)
    resolver = make_resolver(source, environ)
    said = dict(make_report(source, resolver, environ, _Unreached()).lines)["this process"]
    if index is not None:
        assert f"process {index} of {count}" in said
    elif task is not None:
        assert f"not one of the {count} processes" in said
    else:
        assert "process 0 of 1" in said

    default = jobs.DigitsConfig()
    strategy = dataclasses.replace(default.strategy, kind="multi_worker_mirrored")
    config = dataclasses.replace(default, strategy=strategy)
    assert jobs.is_chief(config) == (index in (0, None))
    assert jobs.has_cluster(config) == (count > 1)
    if task is None and count == 1:
        assert estimator.RunConfig().num_worker_replicas == 1
    elif task is None:
        with refused(ClusterError, find_source(environ).because, "2 worker", "train_distribute="):
            estimator.RunConfig()


@pytest.mark.parametrize("started_by", STARTED_BY)
def test_a_process_that_is_alone_and_looks_like_one_of_several_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, started_by: str
) -> None:
    environ, count, _ = _make_environ(started_by, None, None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    _join(monkeypatch)
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(texts) == (started_by in WITH_A_SIGN)
    for text in texts:
        assert "JAXDIST_CLUSTER=none" in text
    caplog.clear()
    monkeypatch.setenv("JAXDIST_CLUSTER", "none")
    assert _join(monkeypatch) == (1, None)
    assert not caplog.records or count > 1
    assert describe_unused_sign({**environ, "JAXDIST_CLUSTER": "none"}) == ""


def _make_config(job: str) -> dict[str, str]:
    """Return the `TF_CONFIG` of one task of a cluster of two workers."""
    task = {"type": job, "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": task})}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (STARTED_BY["srun -n 2"][0], "worker 1 of a cluster of 2 processes (SLURM_STEP_NUM"),
        (_make_config("worker"), "worker 0 of a cluster of 2 processes (TF_CONFIG)"),
        (_make_config("evaluator"), ""),
        # With parameter servers, each worker has devices of its own.
        (_make_environ("nothing", ("worker", 1), None)[0], ""),
        ({"TF_CONFIG": "no json"}, ""),
        ({}, ""),
    ],
)
def test_a_mirrored_strategy_never_joins_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: Mapping[str, str],
    named: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    jaxdist.MirroredStrategy()
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == bool(named)
    assert all(f"MirroredStrategy() in the task {named}" in text for text in texts)
    caplog.clear()
    # Devices by name are a choice.
    jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    assert not caplog.records


def test_another_word_is_refused_with_all_words() -> None:
    with refused(ClusterError, "JAXDIST_CLUSTER is 'lsf'", "slurm or kubernetes", "none"):
        find_source({"JAXDIST_CLUSTER": "lsf"})
