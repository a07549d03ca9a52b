"""The resolver of Slurm, with recorded environments."""

import pathlib
from typing import Any

import pytest

from jaxdist.cluster_resolver import SlurmClusterResolver
from jaxdist.errors import ArgumentError, ArgumentTypeError, ClusterError, JaxdistError
from tests.cluster_resolver.answers.record import answer, is_same, read
from tests.strategies.oracle import refused

# What `srun --ntasks=5 --nodes=2` of Slurm 23.11 gave rank 3, beside what has no meaning here.
SRUN = {
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_GTIDS": "3,4",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[09-10]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.9",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[09-10]",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[09-10]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_SUBMIT_DIR": "/home/me",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURMD_NODENAME": "node10",
}
# In the batch script itself, where nobody called `srun`.
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[09-10]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURMD_NODENAME": "node09",
}
ADDRESSES = ["node09:8888", "node09:8889", "node09:8890", "node10:8888", "node10:8889"]


def _resolver(*args: Any, environ: dict[str, str] | None = None, **made: Any) -> Any:
    told: dict[str, Any] = {"gpus_per_node": 0, **made}
    return SlurmClusterResolver(*args, **told, environ=dict(SRUN) if environ is None else environ)


@pytest.mark.parametrize("row", read("slurm"))
def test_every_answer_is_that_of_tensorflow(row: dict[str, Any]) -> None:
    environ = dict(row["environ"])
    if "error" in row:
        with pytest.raises(JaxdistError) as caught:
            SlurmClusterResolver(**row["made"], environ=environ)
        assert row["error"] in {kind.__name__ for kind in type(caught.value).__mro__}
        return
    if "SLURM_STEP_NUM_TASKS" not in environ and "jobs" not in row["made"]:
        pytest.fail("TensorFlow would have raised")
    made = SlurmClusterResolver(**row["made"], environ=environ)
    assert [made.get_task_info(), made.master()] == [tuple(row["before"]), row["master_before"]]
    if isinstance(row["cluster_spec"], dict) and "error" in row["cluster_spec"]:
        # TensorFlow cannot count to more tasks than GPUs; here such tasks have none.
        assert made.num_accelerators() == {"GPU": 0}
        assert made.cluster_spec().num_tasks(made.get_task_info()[0] or "") > 0
        return
    for name, ask in {
        "cluster_spec": made.cluster_spec,
        "task_info": made.get_task_info,
        "master": made.master,
        "num_accelerators": made.num_accelerators,
        "master_0": lambda: made.master("worker", 0),
        "master_x": lambda: made.master("worker", 0, "http"),
    }.items():
        assert is_same(answer(ask), row[name]), name
    assert environ.get("CUDA_VISIBLE_DEVICES") == row["visible"]


def test_without_arguments_all_tasks_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ADDRESSES}
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.master(), resolver.num_accelerators()) == ("grpc://node10:8888", {"GPU": 0})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a[1,5]b[01-02]", ["a1b01", "a1b02", "a5b01", "a5b02"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("n[9-10],gpu-1.site,r[001]", ["n9", "n10", "gpu-1.site", "r001"]),
        ("x[1]-y", ["x1-y"]),
    ],
)
def test_lists_of_hosts_are_expanded_in_order(text: str, hosts: list[str]) -> None:
    count = str(len(hosts))
    own = {"SLURM_GTIDS": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": hosts[0]}
    of_step = {"SLURM_STEP_NODELIST": text, "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})"}
    counts = {"SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NUM_NODES": count}
    found = _resolver(environ=SRUN | own | of_step | counts).cluster_spec()
    assert found == {"worker": [f"{host}:8888" for host in hosts]}


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a[1-2", "a]1[", "a[x-y]", "a[3-1]", "a[1-9999999999]", "a[]", "a[[1]]"]
)
def test_what_is_no_list_of_hosts_is_quoted(text: str) -> None:
    with refused(ClusterError, f"SLURM_STEP_NODELIST={text!r}", "node[01-03,7]"):
        _resolver(environ=SRUN | {"SLURM_STEP_NODELIST": text}).cluster_spec()


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(x3", "2(x99999999999)", "-1"])
def test_what_is_no_list_of_numbers_is_quoted(text: str) -> None:
    with refused(ClusterError, f"SLURM_STEP_TASKS_PER_NODE={text!r}", "3(x2),1"):
        _resolver(environ=SRUN | {"SLURM_STEP_TASKS_PER_NODE": text}).cluster_spec()


def test_hosts_have_the_order_of_slurm_so_that_task_0_is_where_process_0_runs() -> None:
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": "n9",
    }
    assert _resolver(environ=environ).cluster_spec() == {"worker": ["n9:8888", "n10:8888"]}


def test_a_cyclic_distribution_deals_tasks_in_turn() -> None:
    turn = SRUN | {"SLURM_DISTRIBUTION": "cyclic", "SLURM_LOCALID": "1"}
    resolver = _resolver(environ=turn)
    assert resolver.cluster_spec().job_tasks("worker") == [
        "node09:8888",
        "node10:8888",
        "node09:8889",
        "node10:8889",
        "node09:8890",
    ]


@pytest.mark.parametrize(
    "distribution",
    [
        {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"},
        {"SLURM_DISTRIBUTION": "plane=2"},
    ],
)
def test_a_plane_distribution_deals_some_tasks_in_turn(distribution: dict[str, str]) -> None:
    # 3 tasks on node09, 2 on node10: 2 and 2 in the first turn, then the one that is left.
    places = ["node09:8888", "node09:8889", "node10:8888", "node10:8889", "node09:8890"]
    for rank, place in enumerate(places):
        host, port = place.split(":")
        own = {
            "SLURM_PROCID": str(rank),
            "SLURMD_NODENAME": host,
            "SLURM_LOCALID": str(int(port) - 8888),
        }
        resolver = _resolver(environ=SRUN | distribution | own)
        assert resolver.cluster_spec().job_tasks("worker") == places


@pytest.mark.parametrize(
    ("kind", "plane"), [("arbitrary", None), ("plane", None), ("plane", "0"), ("other", "2")]
)
def test_a_distribution_that_is_not_known_is_an_error_in_every_task(
    kind: str, plane: str | None
) -> None:
    turn = {"SLURM_DISTRIBUTION": kind} | ({} if plane is None else {"SLURM_DIST_PLANESIZE": plane})
    for rank in range(5):
        place = ("node09", rank) if rank < 3 else ("node10", rank - 3)
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": place[0]}
        with refused(ClusterError, f"SLURM_DISTRIBUTION={kind!r}", "--distribution=block"):
            _resolver(environ=SRUN | turn | own | {"SLURM_LOCALID": str(place[1])})


@pytest.mark.parametrize("kind", ["block:cyclic", "block:block,Pack", "cyclic:fcyclic,NoPack"])
def test_how_tasks_are_dealt_to_cores_does_not_matter(kind: str) -> None:
    own = {"SLURM_LOCALID": "1"} if kind.startswith("cyclic") else {}
    resolver = _resolver(environ=SRUN | {"SLURM_DISTRIBUTION": kind} | own)
    assert len(resolver.cluster_spec().job_tasks("worker")) == 5


@pytest.mark.parametrize(
    ("listed", "visible"),
    [(["0", "1", "2", "3", "4", "5"], "0,1"), (["0", "1"], None), ([], None)],
)
def test_gpus_that_slurm_has_not_bound_are_divided(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    listed: list[str],
    visible: str | None,
) -> None:
    lines = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\\n" for n in listed)
    _put_nvidia_smi(tmp_path, monkeypatch, f"printf '{lines}'")
    environ = SRUN | {"SLURM_GPUS_PER_TASK": "h100:2"}
    resolver = SlurmClusterResolver(environ=environ)
    resolver.cluster_spec()
    # This is task 0 of its host, of which node09 has three.
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert resolver.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"SLURMD_NODENAME": "node09"}, ["'node10'", "SLURMD_NODENAME='node09'"]),
        ({"SLURM_LOCALID": "1"}, ["task 0 of its host", "SLURM_LOCALID='1'"]),
        ({"SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "5 tasks"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID='x'", "integer"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_STEP_NUM_TASKS='4'", "5 tasks"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, ["2 hosts", "which are 1"]),
        ({"SLURM_STEP_NODELIST": "a,a"}, ["1 hosts"]),
    ],
)
def test_variables_that_contradict_each_other_are_both_named(
    changes: dict[str, str], parts: list[str]
) -> None:
    with refused(ClusterError, "SlurmClusterResolver", *parts):
        _resolver(environ=SRUN | changes)


def test_a_batch_script_without_srun_is_told_so() -> None:
    with refused(ClusterError, "SLURM_STEP_NODELIST", "SLURM_JOB_ID='4711'", "srun python"):
        _resolver(environ=dict(SBATCH))
    with refused(ClusterError, "no SLURM_PROCID", "no SLURM_JOB_ID either"):
        _resolver(environ={})


def test_jobs_that_do_not_fit_the_step_are_refused() -> None:
    with refused(ClusterError, "6 tasks", "started 5", "{'worker': 5}"):
        _resolver({"worker": 5, "ps": 1})
    with refused(ClusterError, "65536", "port_base=65533"):
        _resolver(port_base=65534)
    for wrong in ({"worker": "5"}, {1: 5}, {}, 5):
        with refused(ArgumentTypeError, "jobs"):
            _resolver(wrong)
    with refused(ArgumentError, "jobs['worker']=-1"):
        _resolver({"worker": -1})
    with refused(ArgumentTypeError, "environ"):
        SlurmClusterResolver(environ=())  # type: ignore[arg-type]


def test_tasks_of_each_host_can_be_told() -> None:
    told = {"node10": 2, "node09": 3}
    assert _resolver(tasks_per_node=told).cluster_spec() == {"worker": ADDRESSES}
    without = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5"}
    resolver = _resolver(tasks_per_node={"node09": 3, "node10": 2}, environ=without)
    assert resolver.cluster_spec() == {"worker": ADDRESSES}
    with refused(ClusterError, "['node09']", "node[09-10]"):
        _resolver(tasks_per_node={"node09": 5})


def test_each_task_gets_its_part_of_the_visible_gpus() -> None:
    environ = SRUN | {"CUDA_VISIBLE_DEVICES": "2,3,5,7,8,9"}
    resolver = _resolver(gpus_per_node=None, environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3,5,7,8,9"
    resolver.cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolver.num_accelerators() == {"GPU": 2}
    resolver.cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("end", ["-1,7,8,9", "NoDevFiles,7,8,9", "none,7,8,9", ",7,8,9", "x,7,8"])
def test_cuda_shows_no_gpu_after_an_entry_that_names_none(end: str) -> None:
    environ = SRUN | {"CUDA_VISIBLE_DEVICES": f"2,3,5,{end}"}
    resolver = _resolver(gpus_per_node=None, environ=environ)
    resolver.cluster_spec()
    assert (environ["CUDA_VISIBLE_DEVICES"], resolver.num_accelerators()) == ("2", {"GPU": 1})


def test_gpus_that_slurm_has_given_each_task_stay() -> None:
    environ = SRUN | {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_PER_TASK": "a100:1"}
    resolver = _resolver(gpus_per_node=None, environ=environ)
    resolver.cluster_spec()
    assert (environ["CUDA_VISIBLE_DEVICES"], resolver.num_accelerators()) == ("1", {"GPU": 1})


def test_more_gpus_than_a_host_has_are_refused() -> None:
    with refused(ClusterError, "gpus_per_task=2", "need 6 GPUs", "it has 4", "gpus_per_task=1"):
        _resolver(gpus_per_node=4, gpus_per_task=2)


def _put_nvidia_smi(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_are_counted_by_nvidia_smi(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"GPU {i}: NVIDIA A100 (UUID: GPU-{i})\\n" for i in range(3))
    _put_nvidia_smi(tmp_path, monkeypatch, f"printf '{lines}'")
    environ = dict(SRUN)
    resolver = _resolver(gpus_per_node=None, environ=environ)
    resolver.cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"
    _put_nvidia_smi(tmp_path, monkeypatch, "echo 'no driver'; exit 9")
    with refused(ClusterError, "code 9: no driver", "gpus_per_node=0"):
        _resolver(gpus_per_node=None)
    monkeypatch.setenv("PATH", "")
    assert _resolver(gpus_per_node=None).num_accelerators() == {"GPU": 0}
