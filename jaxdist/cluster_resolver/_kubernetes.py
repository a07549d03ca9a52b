"""`KubernetesClusterResolver`: resolves pods that the cluster lists, or those of an indexed Job.

Kubernetes gives each pod of an indexed Job its number and the host name `<job>-<number>`; a
headless service gives these names addresses. So no process needs the right to list pods.
"""

import dataclasses
import enum
import importlib
from collections.abc import Mapping
from typing import Any, final

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, as_list, check_instance, check_text, show
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import (
    ListingResolver,
    check_task,
    read_environ,
)
from jaxdist.errors import ClusterError, MissingExtraError

INDEX = "JOB_COMPLETION_INDEX"
MOST_PODS = 1_000_000
_PER_JOB = "PROCESSES_IN_JOB"
_TOTAL = "JAX_PROCESS_COUNT"


@dataclasses.dataclass(frozen=True)
class IndexedJob:
    """The host names of all pods, in the order of their numbers, and the number of this pod."""

    hosts: tuple[str, ...]
    index: int


def read_indexed_job(
    environ: Mapping[str, str],
    service: str | None,
    processes: int | None,
    processes_in_job: int | None,
) -> IndexedJob:
    """Return the pods of the indexed Job or JobSet to which this pod belongs.

    Args:
        environ: The environment of the pod.
        service: Name of the headless service; None for the name of the JobSet.
        processes: Number of all pods; None for `JAX_PROCESS_COUNT`.
        processes_in_job: Number of pods of each Job; None for `PROCESSES_IN_JOB`.

    Raises:
        ClusterError: A variable is missing, or two contradict each other.
    """
    pod = _read_integer(environ, INDEX)
    per_job = processes_in_job or _read_count(environ, _PER_JOB)
    total = processes or _read_count(environ, _TOTAL)
    jobset = environ.get("JOBSET_NAME")
    if jobset is None:
        total = total or per_job
        job = _strip_number(environ.get("HOSTNAME", ""), pod)
        names, own = [job], 0
    else:
        own = _read_integer(environ, "JOB_INDEX") if "JOB_INDEX" in environ else 0
        # With one Job of the JobSet, the pods of the Job are all pods.
        if "JOB_INDEX" not in environ:
            total, per_job = total or per_job, per_job or total
        replicated = _find_replicated_job(environ, jobset, own, pod)
        if total and per_job and total % per_job:
            raise _contradict(f"{total} processes", f"{per_job} in each Job")
        names = [f"{jobset}-{replicated}-{i}" for i in range((total or 0) // (per_job or 1))]
    service = service or jobset
    if service is None:
        raise _miss(
            environ,
            "service",
            "Pods of an indexed Job have addresses only by a headless service. Its name is the "
            "`subdomain` of the pods.",
            "Pass service='my-service', or run a JobSet, which has one with its own name.",
        )
    if not total or (jobset is not None and not per_job):
        missing = _TOTAL if not total else _PER_JOB
        raise _miss(
            environ,
            missing,
            "Kubernetes tells a pod its own number, but not how many pods exist.",
            f"Set {missing} in the pod's `env` to the number of "
            f"{'all pods' if missing == _TOTAL else 'pods of a Job (`completions`)'}, or pass "
            f"{'processes' if missing == _TOTAL else 'processes_in_job'}.",
        )
    per_job = total // len(names) if jobset is None else per_job or total
    if pod >= per_job or own >= len(names):
        raise _contradict(f"pod {pod} of Job {own}", f"{len(names)} Jobs with {per_job} pods each")
    hosts = [f"{name}-{i}.{service}" for name in names for i in range(per_job)]
    return IndexedJob(tuple(hosts), own * per_job + pod)


def _find_replicated_job(environ: Mapping[str, str], jobset: str, job: int, pod: int) -> str:
    name = environ.get("REPLICATED_JOB_NAME")
    host = environ.get("HOSTNAME", "")
    start, end = f"{jobset}-", f"-{job}-{pod}"
    # A pod that uses the host's network has the host name of the machine.
    derived = host[len(start) : -len(end)] if host.startswith(start) and host.endswith(end) else ""
    if name and host.startswith(f"{start}{name}-") and derived != name:
        raise _contradict(f"HOSTNAME={host!r}", f"JOB_INDEX={job}, {INDEX}={pod}")
    if not name and not derived:
        raise _miss(
            environ,
            "REPLICATED_JOB_NAME",
            f"Pods of a JobSet are called <JobSet>-<job>-<number>-<number>, and HOSTNAME={host!r}.",
            "Set REPLICATED_JOB_NAME in the pod's `env` from the annotation "
            "jobset.sigs.k8s.io/replicatedjob-name.",
        )
    return name or derived


def _strip_number(host: str, pod: int) -> str:
    if not host.endswith(f"-{pod}") or host == f"-{pod}":
        raise _contradict(f"HOSTNAME={host!r}", f"{INDEX}={pod}")
    return host.removesuffix(f"-{pod}")


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) > MOST_PODS:
        raise ClusterError(
            f"KubernetesClusterResolver read {name}={text!r}.\n\n"
            f"It is an integer from 0 to {MOST_PODS}.\n\n"
            "Kubernetes sets JOB_COMPLETION_INDEX in pods of a Job with completionMode: Indexed; "
            "JOB_INDEX comes from the annotation jobset.sigs.k8s.io/job-index."
        )
    return int(text)


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    return _read_integer(environ, name) if name in environ else None


def _miss(environ: Mapping[str, str], name: str, rule: str, remedy: str) -> ClusterError:
    return ClusterError(
        f"KubernetesClusterResolver read {INDEX}={environ.get(INDEX)!r}, and {name} is missing.\n\n"
        f"{rule}\n\n{remedy}"
    )


def _contradict(one: str, other: str) -> ClusterError:
    return ClusterError(
        f"KubernetesClusterResolver found {one}, and {other}: they contradict each other.\n\n"
        "Pods of an indexed Job are called <job>-<number>; those of a JobSet "
        "<JobSet>-<job>-<number of the Job>-<number>.\n\nCorrect the variables in the pod's `env`, "
        "or pass job_to_label_mapping, which lists the pods."
    )


_CALLER = "KubernetesClusterResolver"
_DEFAULT = {"worker": ["job-name=tensorflow"]}


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs: in a pod of the cluster, or elsewhere.

    Example:
        >>> jaxdist.cluster_resolver.KubernetesExecutableLocation.OFF_CLUSTER.value
        1

    Source:
        `tf.distribute.cluster_resolver.KubernetesExecutableLocation`.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ListingResolver):
    """A resolver for pods of Kubernetes.

    With `job_to_label_mapping` or `override_client`, and outside an indexed Job, the resolver lists
    the pods. This needs the right to list pods, and the package `kubernetes` unless
    `override_client` is given. The address of a pod is that of its host, as in TensorFlow, so its
    port must be open there. The user sets `task_type` and `task_id`.

    In a pod of an indexed Job or a JobSet (`JOB_COMPLETION_INDEX` is set), without these two
    arguments, the resolver reads only the environment. Addresses are host names of the pods under a
    headless service, and the task of this process is known.

    Args:
        job_to_label_mapping: For each job, label selectors of its pods; the default is
            `{'worker': ['job-name=tensorflow']}`.
        tf_server_port: The port of all addresses.
        rpc_layer: The protocol prefix of addresses.
        override_client: A `kubernetes.client.CoreV1Api`, or an object with its
            `list_pod_for_all_namespaces`.
        executable_location: Where the credentials of the cluster are: in the pod, or in the
            kubeconfig of the user.
        service: The headless service of an indexed Job; by default the name of the JobSet.
        processes: The number of pods of an indexed Job or JobSet; by default `JAX_PROCESS_COUNT`,
            or `PROCESSES_IN_JOB` for a single Job.
        processes_in_job: The number of pods of each Job, in a JobSet with several Jobs; by default
            `PROCESSES_IN_JOB`.
        environ: The environment variables to read, instead of those of this process.

    Raises:
        MissingExtraError: The resolver must list pods, and `kubernetes` is not installed.
        ClusterError: There are no credentials, or the variables of an indexed Job are missing or
            contradict each other.
        ArgumentError: `executable_location` is not a member of its enum, or `override_client`
            cannot list pods.

    Example:
        >>> environ = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
        >>> resolver = jaxdist.cluster_resolver.KubernetesClusterResolver(
        ...     service="train-svc", processes=2, environ=environ)
        >>> resolver.cluster_spec(), resolver.task_id
        (ClusterSpec({'worker': ['train-0.train-svc:8470', 'train-1.train-svc:8470']}), 1)

    Source:
        `tf.distribute.cluster_resolver.KubernetesClusterResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        job_to_label_mapping: Mapping[str, list[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
        *,
        service: str | None = None,
        processes: int | None = None,
        processes_in_job: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if job_to_label_mapping is not None:
            _check_mapping(job_to_label_mapping)
        self._port = as_integer("tf_server_port", tf_server_port, least=1, most=65535, example=8470)
        check_task(None, None, rpc_layer)
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise refuse(
                f"executable_location={show(executable_location)}.",
                "executable_location is a member of KubernetesExecutableLocation.",
                "Pass KubernetesExecutableLocation.WITHIN_CLUSTER in a pod, OFF_CLUSTER elsewhere.",
            )
        if service is not None:
            check_text("service", service, "train-svc")
        for name, number in (("processes", processes), ("processes_in_job", processes_in_job)):
            if number is not None:
                as_integer(name, number, least=1, most=MOST_PODS)
        variables = read_environ(environ)
        self.rpc_layer = rpc_layer
        self._mapping = {job: list(s) for job, s in (job_to_label_mapping or _DEFAULT).items()}
        self._indexed: IndexedJob | None = None
        self._client = override_client
        if not job_to_label_mapping and override_client is None and INDEX in variables:
            self._indexed = read_indexed_job(variables, service, processes, processes_in_job)
            self._task_type, self._task_id = "worker", self._indexed.index
        elif override_client is None:
            self._client = _make_client(executable_location)
        elif not hasattr(override_client, "list_pod_for_all_namespaces"):
            raise refuse(
                f"override_client={show(override_client)}.",
                "override_client is a client of Kubernetes with list_pod_for_all_namespaces.",
                "Pass kubernetes.client.CoreV1Api().",
            )

    def cluster_spec(self) -> ClusterSpec:
        """Return the pods, from the environment of an indexed Job, or listed at each call.

        Raises:
            ClusterError: A pod is not running.
        """
        if self._indexed is not None:
            return ClusterSpec({"worker": [f"{h}:{self._port}" for h in self._indexed.hosts]})
        return ClusterSpec(
            {
                job: [
                    f"{pod.status.host_ip}:{self._port}"
                    for selector in selectors
                    for pod in self._list_pods(selector)
                ]
                for job, selectors in self._mapping.items()
            }
        )

    def _describe_source(self) -> str:
        return "" if self._indexed is None else f"{INDEX}={self._indexed.index}"

    def _list_pods(self, selector: str) -> list[Any]:
        listed = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        # Sorted by name, so that every process gets the same order.
        pods = sorted(listed, key=lambda pod: pod.metadata.name)
        for pod in pods:
            if pod.status.phase != "Running":
                raise ClusterError(
                    f"{_CALLER}.cluster_spec found pod {pod.metadata.name!r} in the phase "
                    f"{pod.status.phase!r}.\n\nAll pods of a job run when its tasks are listed.\n\n"
                    f"Wait until `kubectl get pods -l {selector}` shows them as Running."
                )
        return pods


def _check_mapping(mapping: Any) -> None:
    what = "a dict from jobs to lists of selectors of labels"
    remedy = "Pass for instance {'worker': ['job-name=train']}."
    check_instance("job_to_label_mapping", mapping, Mapping, what, remedy)
    for job, selectors in mapping.items():
        check_instance("job_to_label_mapping", job, str, what, remedy)
        as_list(f"job_to_label_mapping[{job!r}]", selectors, what, remedy, str)


def _make_client(location: KubernetesExecutableLocation) -> Any:
    try:
        config: Any = importlib.import_module("kubernetes.config")
        client: Any = importlib.import_module("kubernetes.client")
    except ImportError:
        raise MissingExtraError(
            f"{_CALLER} would list pods, and the package kubernetes is not installed.\n\n"
            "jaxdist is installed without its optional packages. In an indexed Job or a JobSet no "
            "pods are listed: there environ has a JOB_COMPLETION_INDEX.\n\n"
            "Install it with: pip install kubernetes"
        ) from None
    within = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    try:
        (config.load_incluster_config if within else config.load_kube_config)()
    except config.ConfigException as error:
        other = "OFF_CLUSTER" if within else "WITHIN_CLUSTER"
        raise ClusterError(
            f"{_CALLER} found no credentials for {location.name}: {error}\n\n"
            "WITHIN_CLUSTER takes those of the pod's service account, OFF_CLUSTER those of the "
            f"user's kubeconfig.\n\nPass executable_location=KubernetesExecutableLocation.{other}, "
            "or override_client."
        ) from error
    return client.CoreV1Api()
