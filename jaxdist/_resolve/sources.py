"""Chooses where to read the tasks of a job, and makes the resolver for it."""

import dataclasses
from collections.abc import MutableMapping

from jaxdist._called import called, refuse
from jaxdist.cluster_resolver import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    choose_slurm_port,
    find_source,
)
from jaxdist.errors import ArgumentError

SOURCES = ("tf_config", "slurm", "kubernetes", "gce", "tpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings that the environment does not contain.

    Attributes:
        port: The port of all addresses; with Slurm the first port of a host.
        labels: Label selectors of pods; with them, the resolver lists the pods.
        is_off_cluster: Whether to list pods with the kubeconfig of the user.
        service: The headless service of an indexed Job.
        processes: Number of pods of an indexed Job or JobSet.
        processes_in_job: Number of pods of each Job of a JobSet.
        project: The project of an instance group.
        zone: Its zone.
        instance_group: Its name.
        task_type: The job of this process.
        task_id: The number of this process in its job.
    """

    port: int | None = None
    labels: tuple[str, ...] = ()
    is_off_cluster: bool = False
    service: str | None = None
    processes: int | None = None
    processes_in_job: int | None = None
    project: str | None = None
    zone: str | None = None
    instance_group: str | None = None
    task_type: str | None = None
    task_id: int | None = None


def choose_source(environ: MutableMapping[str, str]) -> str:
    """Return the source that strategies use; `tf_config` for a process that is alone.

    See Note [Which cluster a process is in].
    """
    found = find_source(environ).name
    return found if found in SOURCES else "tf_config"


def make_resolver(
    source: str, environ: MutableMapping[str, str], options: Options
) -> ClusterResolver:
    """Return the resolver of a source.

    Raises:
        ArgumentError: For `gce`, the project, the zone or the instance group is missing.
        JaxdistError: The resolver raises an error.
    """
    port = options.port
    resolver: ClusterResolver
    if source == "slurm":
        # The port is that of strategies. GPUs are neither counted nor set.
        resolver = SlurmClusterResolver(
            port_base=port or choose_slurm_port(environ), gpus_per_node=0, environ=dict(environ)
        )
    elif source == "kubernetes":
        resolver = KubernetesClusterResolver(
            {"worker": list(options.labels)} if options.labels else None,
            port or 8470,
            executable_location=KubernetesExecutableLocation(int(options.is_off_cluster)),
            service=options.service,
            processes=options.processes,
            processes_in_job=options.processes_in_job,
            environ=environ,
        )
    elif source == "gce":
        resolver = _make_gce(port or 8470, options)
    elif source == "tpu":
        resolver = TPUClusterResolver("")
    else:
        resolver = TFConfigClusterResolver(environ=environ)
    # Before the options: in this call a resolver may set its own task.
    resolver.cluster_spec()
    if options.task_type is not None and source != "gce":
        resolver.task_type = options.task_type
    if options.task_id is not None:
        resolver.task_id = options.task_id
    return resolver


@called("--from gce")
def _make_gce(port: int, options: Options) -> GCEClusterResolver:
    project, zone, group = options.project, options.zone, options.instance_group
    if project is None or zone is None or group is None:
        raise refuse(
            ArgumentError,
            f"--project {project}, --zone {zone} and --instance-group {group}.",
            "An instance group has all three.",
            "Pass --project my-project --zone us-west1-a --instance-group my-group.",
        )
    task_type = options.task_type or "worker"
    return GCEClusterResolver(project, zone, group, port, task_type, options.task_id)
