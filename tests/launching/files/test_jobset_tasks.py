"""`--print jobset --ps`: a manifest that Kubernetes accepts, and whose pods know each other."""

import pathlib
from typing import Any

import pytest

from jaxdist.cli import main
from jaxdist.cluster_resolver import TFConfigClusterResolver
from tests.launching.files.printed import ROOT, SCRIPT, check_schema, print_file, read_documents

CONFIG = str(ROOT / "configs" / "digits_parameter_server.toml")
TASKS = ("--ps", "2", "--workers", "3", "--print", "jobset")


def _read(text: str) -> tuple[Any, dict[str, Any]]:
    """Return the JobSet, and its Jobs."""
    *_, jobset = read_documents(text)
    check_schema(jobset, "jobset")
    jobs = {j["name"]: j["template"]["spec"] for j in jobset["spec"]["replicatedJobs"]}
    assert list(jobs) == ["chief", "ps", "worker"]
    return jobset, jobs


def _get_pod(job: Any) -> tuple[Any, Any]:
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def _fill_in(container: Any, index: int) -> dict[str, str]:
    """Return the variables of a pod, as Kubernetes makes them."""
    known: dict[str, str] = {}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            value = str(index)
        for name, content in known.items():
            value = value.replace(f"$({name})", content)
        assert "$(" not in value
        known[variable["name"]] = value
    return known


def test_each_pod_finds_all_tasks_and_itself(capsys: pytest.CaptureFixture[str]) -> None:
    jobset, jobs = _read(print_file(capsys, *TASKS, SCRIPT))
    name = jobset["metadata"]["name"]
    found = set()
    for job, count in {"chief": 1, "ps": 2, "worker": 3}.items():
        spec = jobs[job]
        assert (spec["completions"], spec["parallelism"]) == (count, count)
        assert spec["completionMode"] == "Indexed"
        for index in range(count):
            variables = _fill_in(_get_pod(spec)[1], index)
            resolver = TFConfigClusterResolver(environ=variables)
            assert (resolver.task_type, resolver.task_id) == (job, index)
            cluster = resolver.cluster_spec()
            found.add((tuple(cluster.job_tasks("ps")), tuple(cluster.job_tasks("worker"))))
    # Names of pods of a JobSet, in the domain of its service.
    assert found == {
        (
            tuple(f"{name}-ps-0-{i}.{name}:8470" for i in range(2)),
            tuple(f"{name}-worker-0-{i}.{name}:8470" for i in range(3)),
        )
    }
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert jobset["spec"]["network"] == network


def test_the_chief_ends_the_job_and_the_others_start_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = print_file(capsys, *TASKS, "--restarts", "3", "--time", "1:00:00", SCRIPT)
    jobset, jobs = _read(text)
    policy = {"operator": "All", "targetReplicatedJobs": ["chief"]}
    assert jobset["spec"]["successPolicy"] == policy
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert jobs["chief"]["backoffLimit"] == 3
    assert [_get_pod(job)[0]["restartPolicy"] for job in jobs.values()] == [
        "Never",
        "OnFailure",
        "OnFailure",
    ]
    assert all(job["backoffLimit"] >= 1000 for name, job in jobs.items() if name != "chief")
    assert all(job["activeDeadlineSeconds"] == 3600 for job in jobs.values())
    assert text.startswith("# 6 processes")


def test_every_task_has_the_secret_and_servers_have_a_place_for_snapshots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SECRET", "a secret of this shell, long enough")
    text = print_file(capsys, *TASKS, "--name", "a-job", SCRIPT)
    assert "kubectl create secret generic a-job-secret --from-literal=secret=" in text
    assert "a secret of this shell" not in text
    for claim in (None, "kept"):
        given = () if claim is None else ("--snapshot-directory", claim)
        _, jobs = _read(print_file(capsys, *TASKS, "--name", "a-job", *given, SCRIPT))
        for name, job in jobs.items():
            pod, container = _get_pod(job)
            volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert volumes["secret"] == {"secret": {"secretName": "a-job-secret"}}
            variables = _fill_in(container, 0)
            assert variables["JAXDIST_SECRET_FILE"] == f"{mounts['secret']}/secret"
            if name != "ps":
                assert "snapshots" not in volumes
                continue
            kept = {"emptyDir": {}} if claim is None else {}
            if claim is not None:
                kept["persistentVolumeClaim"] = {"claimName": claim}
            assert volumes["snapshots"] == kept
            assert variables["JAXDIST_SNAPSHOT_DIRECTORY"] == mounts["snapshots"]


def test_gpus_are_those_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--gpu", "NVIDIA-H100-80GB-HBM3", "--cpus", "4", "--devices-per-process", "2")
    _, jobs = _read(print_file(capsys, *TASKS, *argv, "--image", "a/b:1", SCRIPT))
    for name, job in jobs.items():
        pod, container = _get_pod(job)
        is_worker = name == "worker"
        amounts = {"cpu": "4", **({"nvidia.com/gpu": "2"} if is_worker else {})}
        assert container["resources"]["limits"] == amounts
        assert ("nodeSelector" in pod) == is_worker
        assert (_fill_in(container, 0).get("JAX_PLATFORMS") == "cpu") != is_worker
        assert (container["image"], container["args"]) == ("a/b:1", [SCRIPT])


def test_of_train_the_chief_alone_has_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, jobset = read_documents(print_file(capsys, *TASKS, "train", CONFIG))
    assert config["data"] == {"digits_parameter_server.toml": pathlib.Path(CONFIG).read_text()}
    jobs = {j["name"]: j["template"]["spec"] for j in jobset["spec"]["replicatedJobs"]}
    for name, job in jobs.items():
        pod, container = _get_pod(job)
        is_chief = name == "chief"
        arguments = ["train", "/job/digits_parameter_server.toml"] if is_chief else ["server"]
        assert container["args"] == ["-m", "jaxdist", *arguments]
        assert any("configMap" in volume for volume in pod["volumes"]) == is_chief
        install = container["command"][2]
        assert all(f" {package}==" in install for package in ("grpcio", "flatbuffers"))
        assert (" scikit-learn " in install) == is_chief


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["jobset", "--snapshot-directory", "/kept"], ["PersistentVolumeClaim", "/kept"]),
        (["jobset", "--hosts", "3"], ["--workers 2 and --hosts 3", "Leave out --hosts"]),
        (["slurm", "--hosts", "2"], ["--ps 1 --workers 2 and --hosts 2", "Leave out --hosts"]),
        (["slurm", "--image", "a"], ["--image a", "plugin"]),
        (["skypilot"], ["--ps 1 --workers 2", "--on ray --ps 1 --workers 2"]),
        (["slurm", "--grace-seconds", "3"], ["--grace-seconds 3.0", "starts none"]),
        (["slurm", "--on", "ray"], ["--on ray", "starts none"]),
    ],
)
def test_what_cannot_be_printed_is_refused(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--ps", "1", "--workers", "2", "--print", *argv, SCRIPT]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for part in parts:
        assert part in printed.err
