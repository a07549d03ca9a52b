"""Valid calls of the cluster resolvers that read an environment or ask a service."""

from types import SimpleNamespace
from typing import Any

from jaxdist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from tests.bad_inputs.call import Call

_TF_CONFIG = {
    "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
}
_SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "CUDA_VISIBLE_DEVICES": "",
}
_POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
_WHERE = {"task_type": "worker", "task_id": 1}
_SPEC = ClusterSpec({"worker": ["a:1", "b:1"]})


class _Pods:
    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        status = SimpleNamespace(phase="Running", host_ip="10.0.0.1")
        named = [SimpleNamespace(name=f"train-{i}") for i in range(2)]
        return SimpleNamespace(items=[SimpleNamespace(metadata=n, status=status) for n in named])


class _Machines:
    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def instanceGroups(self) -> "_Machines":
        return self

    def instances(self) -> "_Machines":
        return self

    def listInstances(self, **_: Any) -> "_Machines":
        return _Machines({"items": [{"instance": "x/vm-0"}, {"instance": "x/vm-1"}]})

    def listInstances_next(self, **_: Any) -> None:
        return None

    def get(self, **_: Any) -> "_Machines":
        return _Machines({"networkInterfaces": [{"networkIP": "10.0.0.1"}]})

    def execute(self) -> Any:
        return self._answer


def _gce() -> dict[str, Any]:
    where = {"project": "p", "zone": "z", "instance_group": "g", "port": 8470}
    return {**where, "service": _Machines(), "metadata": lambda path: "10.0.0.1"}


def _slurm() -> dict[str, Any]:
    return {"jobs": {"worker": 2}, "environ": dict(_SLURM)}


def _union() -> UnionResolver:
    return UnionResolver(SimpleClusterResolver(_SPEC, num_accelerators={"GPU": 1}))


def _use(resolver: ClusterResolver) -> None:
    resolver.master()
    resolver.cluster_spec()


_MADE = {
    "TFConfigClusterResolver": lambda: TFConfigClusterResolver(environ=_TF_CONFIG),
    "SlurmClusterResolver": lambda: SlurmClusterResolver(**_slurm()),
    "KubernetesClusterResolver": lambda: KubernetesClusterResolver(override_client=_Pods()),
    "GCEClusterResolver": lambda: GCEClusterResolver(**_gce()),
    "UnionResolver": _union,
}
_PLACE = "jaxdist.cluster_resolver"
CALLS: dict[str, Call] = {
    f"{_PLACE}.ClusterSpec.as_cluster_def": Call(lambda: _SPEC.as_cluster_def),
    f"{_PLACE}.TFConfigClusterResolver": Call(
        lambda: TFConfigClusterResolver, lambda: {"environ": _TF_CONFIG}, use=_use
    ),
    f"{_PLACE}.SlurmClusterResolver": Call(lambda: SlurmClusterResolver, _slurm, use=_use),
    f"{_PLACE}.SlurmClusterResolver.get_task_info": Call(
        lambda: SlurmClusterResolver(**_slurm()).get_task_info
    ),
    # A valid client, or a valid environment: with both, nothing reads the second.
    f"{_PLACE}.KubernetesClusterResolver": Call(
        lambda: KubernetesClusterResolver,
        lambda: {
            "service": "svc",
            "processes": 2,
            "processes_in_job": 2,
            "environ": _POD,
            "executable_location": KubernetesExecutableLocation.WITHIN_CLUSTER,
        },
        use=_use,
    ),
    f"{_PLACE}.GCEClusterResolver": Call(lambda: GCEClusterResolver, _gce, use=_use),
    f"{_PLACE}.UnionResolver": Call(
        lambda: lambda **given: UnionResolver(SimpleClusterResolver(_SPEC), **given), use=_use
    ),
    **{
        f"{_PLACE}.{name}.cluster_spec": Call(lambda make=make: make().cluster_spec)
        for name, make in _MADE.items()
    },
    **{
        f"{_PLACE}.{name}.master": Call(
            lambda make=make: make().master, lambda: {**_WHERE, "rpc_layer": "grpc"}
        )
        for name, make in _MADE.items()
        # They inherit the method that GCEClusterResolver has.
        if name not in ("SlurmClusterResolver", "KubernetesClusterResolver")
    },
    **{
        f"{_PLACE}.{name}.num_accelerators": Call(
            lambda make=make: make().num_accelerators, lambda: dict(_WHERE)
        )
        for name, make in _MADE.items()
        if name in ("TFConfigClusterResolver", "SlurmClusterResolver", "UnionResolver")
    },
}
