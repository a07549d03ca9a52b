"""`--print jobset`: a manifest that Kubernetes accepts, and whose pods find each other."""

import pathlib
import shlex
import sys
from typing import Any

import jsonschema
import pytest

from jaxdist.cluster_resolver import KubernetesClusterResolver, choose_resolver
from tests.launching.files.printed import SCRIPT, check_schema, print_file, read_documents

CONFIG = str(pathlib.Path(__file__).parents[3] / "configs" / "digits_multi_worker.toml")
INSTALL = "pip install --quiet"
ALL = ("--name", "a-job", "--gpu", "NVIDIA-H100-80GB-HBM3", "--image", "registry/image:1",
       "--cpus", "8", "--memory", "32", "--time", "1-02:00:03", "--restarts", "5",
       "--devices-per-process", "2")  # fmt: skip


def _read_pod(jobset: Any) -> tuple[Any, Any, Any]:
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return job, pod, container


def test_one_option_makes_a_complete_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    text = print_file(capsys, "-n", "3", "--print", "jobset", SCRIPT, "--rate", "$(HOME)")
    script, jobset = read_documents(text)
    check_schema(jobset, "jobset")
    job, pod, container = _read_pod(jobset)
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}
    # The script itself, at the path of the command. Kubernetes makes `$(` of `$$(`.
    assert script["data"] == {"cluster_script.py": pathlib.Path(SCRIPT).read_text()}
    assert container["args"] == ["/job/cluster_script.py", "--rate", "$$(HOME)"]
    assert container["volumeMounts"] == [{"name": "job", "mountPath": "/job"}]
    assert pod["volumes"] == [{"name": "job", "configMap": {"name": script["metadata"]["name"]}}]
    assert container["image"] == f"python:{sys.version_info.major}.{sys.version_info.minor}"
    start, command, *rest = shlex.split(container["command"][2])[:2], *container["command"][2:]
    assert start == ["pip", "install"]
    assert command.endswith(' && exec python "$@"')
    assert rest == ["sh"]


def test_every_option_is_in_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    (jobset,) = read_documents(print_file(capsys, "-n", "4", *ALL, "--print", "jobset", SCRIPT))
    check_schema(jobset, "jobset")
    job, pod, container = _read_pod(jobset)
    assert jobset["metadata"]["name"] == "a-job"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 5}
    assert job["activeDeadlineSeconds"] == 26 * 3600 + 3
    assert (container["image"], container["args"]) == ("registry/image:1", [SCRIPT])
    amounts = {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert not {v["name"] for v in container["env"]} & {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"}


def test_the_schema_refuses_what_kubernetes_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    _, jobset = read_documents(print_file(capsys, "-n", "3", "--print", "jobset", SCRIPT))
    _read_pod(jobset)[2]["cmd"] = ["python"]
    with pytest.raises(jsonschema.ValidationError, match="cmd"):
        check_schema(jobset, "jobset")


def test_the_pods_of_a_manifest_find_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, jobset = read_documents(print_file(capsys, "-n", "3", "--print", "jobset", SCRIPT))
    name = jobset["metadata"]["name"]
    workers = jobset["spec"]["replicatedJobs"][0]["name"]
    # What JobSet writes on each pod.
    annotations = {"jobset-name": name, "replicatedjob-name": workers, "job-index": "0"}
    monkeypatch.delenv("TF_CONFIG", raising=False)
    addresses = set()
    for index in range(3):
        for variable in _read_pod(jobset)[2]["env"]:
            value = variable.get("value")
            if value is None:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                key = path.removeprefix("metadata.annotations['jobset.sigs.k8s.io/")
                value = annotations[key.removesuffix("']")]
            monkeypatch.setenv(variable["name"], value)
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setenv("HOSTNAME", f"{name}-{workers}-0-{index}")
        resolver = choose_resolver()
        assert isinstance(resolver, KubernetesClusterResolver)
        assert (resolver.task_type, resolver.task_id) == ("worker", index)
        addresses.add(tuple(resolver.cluster_spec().as_dict()["worker"]))
    assert addresses == {tuple(f"{name}-{workers}-0-{i}.{name}:8470" for i in range(3))}


def test_the_configuration_of_train_is_in_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--install", "git+https://a/b", "train", CONFIG, "--set", "training.steps=1")
    config, jobset = read_documents(print_file(capsys, "-n", "2", "--print", "jobset", *argv))
    check_schema(jobset, "jobset")
    assert config["data"] == {"digits_multi_worker.toml": pathlib.Path(CONFIG).read_text()}
    _, _, container = _read_pod(jobset)
    path = "/job/digits_multi_worker.toml"
    expected = ["-m", "jaxdist", "train", path, "--set", "training.steps=1"]
    assert container["args"] == expected
    assert container["command"][2].startswith(f"{INSTALL} git+https://a/b jax==")
    assert " scikit-learn " in container["command"][2]
    named = (*argv[:3], "digits_multi_worker", *argv[4:])
    by_name = read_documents(print_file(capsys, "-n", "2", "--print", "jobset", *named))
    assert by_name == [config, jobset]
    _, usual = read_documents(print_file(capsys, "-n", "2", "--print", "jobset", "train", CONFIG))
    assert _read_pod(usual)[2]["command"][2].startswith(f"{INSTALL} jaxdist==")
