"""`TPUClusterResolver`: local TPUs, virtual slices on CPU devices, and described slices."""

import os
from collections.abc import Mapping
from typing import Any, final

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import (
    check_instance,
    check_text,
    log_without_effect,
    show,
)
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._connect import experimental_connect_to_cluster
from jaxdist.cluster_resolver._resolver import (
    ClusterResolver,
    check_task,
    log_unused_arguments,
    master_url,
)
from jaxdist.errors import NotFoundError
from jaxdist.tpu import TPUSystem, slice_of, system_of, topology_of_bytes
from jaxdist.tpu.experimental import (
    HardwareFeature,
    Topology,
    TPUSystemMetadata,
    initialize_tpu_system,
)

# The port at which JAX's processes on the hosts of a TPU slice connect.
_PORT = 8482


@final
class TPUClusterResolver(ClusterResolver):
    """A resolver of TPUs: those of this machine and its slice, virtual ones, or described ones.

    A program for TPUs runs on the host machines of the chips, so the resolver queries no Cloud
    service for addresses. It accesses no device before `initialize_tpu_system` or a strategy.

    Args:
        tpu: `''`, `'local'` or None: the TPUs of this machine, and of the other hosts of its slice;
            the name of this TPU VM (`TPU_NAME`) means the same.
            `'virtual:v4:2x2x1'`: CPU devices in the layout of that slice
            (`testing.virtual_devices` makes enough of them). `'described:v5p:4x4x4'`: a slice that
            libtpu describes, to compile for; `'described:v5e:4x4*2'` means two such slices.
        zone: No effect, which is logged: the resolver queries no Cloud service.
        project: As `zone`.
        job_name: The job of the hosts.
        coordinator_name: The job of the coordinator, a further job; needs `coordinator_address`.
        coordinator_address: Address of the coordinator.
        credentials: As `zone`.
        service: As `zone`.
        discovery_url: As `zone`.

    Raises:
        NotFoundError: `tpu` names a TPU of another machine.
        TopologyError: The virtual or described slice does not exist.
        ArgumentError: `coordinator_name` is given without an address, or `'virtual:'` or
            `'described:'` without a slice.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
        >>> jaxdist.config.experimental_connect_to_cluster(resolver)
        >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
        >>> jaxdist.TPUStrategy(resolver).num_replicas_in_sync
        8

    Source:
        `tf.distribute.cluster_resolver.TPUClusterResolver`.
    """

    @called("TPUClusterResolver")
    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        names = {
            "zone": zone,
            "project": project,
            "coordinator_name": coordinator_name,
            "coordinator_address": coordinator_address,
            "discovery_url": discovery_url,
        }
        for key, text in names.items():
            check_instance(key, text, (str, type(None)), "a string or None", f"Leave {key} out.")
        check_text("job_name", job_name, "worker")
        if coordinator_name and not coordinator_address:
            raise refuse(
                f"coordinator_name={coordinator_name!r} and no coordinator_address.",
                "jaxdist starts no server for a coordinator, and cannot look up its address.",
                "Pass coordinator_address='host:port' too, or leave both out.",
            )
        asked = {"zone": zone, "project": project, "service": service}
        asked |= {"discovery_url": discovery_url}
        is_default = isinstance(credentials, str) and credentials == "default"
        asked |= {"credentials": None if is_default else credentials}
        for name, value in asked.items():
            if value is not None:
                why = "the TPU is that of this machine, and no Cloud service is queried"
                log_without_effect(name, why)
        self._name = _resolve_name(tpu, os.environ)
        self._task_type = job_name
        self._task_id = _find_task_id(os.environ)
        self._coordinator = (coordinator_name, coordinator_address)
        self._topology: Topology | None = None

    @staticmethod
    @called(
        "TPUClusterResolver.connect",
        replaces=("TPUClusterResolver", "initialize_tpu_system(cluster_resolver=...)"),
    )
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> "TPUClusterResolver":
        """Make a resolver, connect to the other hosts of its slice, and initialize its TPUs.

        Args:
            tpu: As for the class.
            zone: As for the class.
            project: As for the class.

        Returns:
            The resolver.

        Raises:
            NotFoundError: No TPU was found; the message says where jaxdist searched.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver.connect("virtual:v5e:2x4")
            >>> resolver.num_accelerators()
            {'TPU': 4}

        Source:
            `tf.distribute.cluster_resolver.TPUClusterResolver.connect`.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        experimental_connect_to_cluster(resolver)
        initialize_tpu_system(resolver)
        return resolver

    @property
    def tpu_name(self) -> str:
        """`'local'`, or the name of the virtual or described slice."""
        return self._name

    @property
    def is_local(self) -> bool:
        """Whether the TPUs are real: those of this machine and its slice."""
        return self._name == "local"

    @property
    def tpu_system(self) -> TPUSystem:
        """The devices and their topology; the first access looks for the devices."""
        return system_of(self._name, repr(self))

    def cluster_spec(self) -> ClusterSpec:
        """Return the hosts of the slice that the environment lists; empty for one host.

        The environment variable is `TPU_PROCESS_ADDRESSES` or `TPU_WORKER_HOSTNAMES`. With a
        `coordinator_name`, the spec also contains that job.
        """
        hosts = _list_hosts(os.environ) if self.is_local else []
        name, address = self._coordinator
        jobs: dict[str, list[str]] = {}
        # One host needs no address; `master` returns '' for it.
        if len(hosts) > 1 and self.task_type:
            jobs[self.task_type] = [f"{host}:{_PORT}" for host in hosts]
        if name and address:
            jobs[name] = [address]
        return ClusterSpec(jobs)

    @called("TPUClusterResolver.master")
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a host of the slice; empty for one host.

        Args:
            task_type: The job, together with `task_id`; by default the host of this process.
            task_id: The number of the host.
            rpc_layer: The protocol prefix of the address; the default is `grpc`.
        """
        check_task(task_type, task_id, rpc_layer)
        spec = self.cluster_spec()
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type, self.task_id
        if not spec or task_type not in spec.jobs or task_id is None:
            return ""
        return master_url(spec.task_address(task_type, task_id), rpc_layer or "grpc")

    def get_master(self) -> str:
        """Return the address of the host of this process; empty for one host."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return the job of the hosts."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Return the task to which processes connect: the first host of the slice."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return the numbers of cores and hosts, the topology and the devices."""
        return self.tpu_system.metadata

    @property
    def tpu_hardware_feature(self) -> HardwareFeature:
        """The features of the chips besides matrix products."""
        return self.tpu_system.hardware_feature

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Set the topology, as `initialize_tpu_system` does."""
        caller = "set_tpu_topology(serialized_tpu_topology=...)"
        self._topology = topology_of_bytes(serialized_tpu_topology, caller)

    @property
    def tpu_topology(self) -> Topology | None:
        """The topology, or None before the TPUs are initialized."""
        return self._topology

    @called("TPUClusterResolver.num_accelerators")
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of TPU cores of each host; all hosts have the same number."""
        log_unused_arguments(config_proto, task_type, task_id)
        check_task(task_type, task_id)
        return {"TPU": self.tpu_system.topology.num_tpus_per_task}

    def __enter__(self) -> "TPUClusterResolver":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the resolver holds no resource."""

    def __repr__(self) -> str:
        return f"TPUClusterResolver({self._name!r})"


@called(
    "TPUClusterResolver",
    replaces="tpu.slice_of",
    arguments={"name=": lambda tpu: f"tpu={tpu!r}, and the slice "},
)
def _resolve_name(tpu: Any, environ: Mapping[str, str]) -> str:
    if tpu is not None and not isinstance(tpu, str):
        raise refuse_type(
            f"tpu={show(tpu)}.", "tpu is a string or None.", "Pass '' for the TPUs of this machine."
        )
    if not tpu or tpu == "local" or tpu == environ.get("TPU_NAME"):
        return "local"
    prefix, _, rest = tpu.partition(":")
    if prefix in ("virtual", "described"):
        if not rest:
            raise refuse(
                f"tpu={tpu!r}, without the name of a slice.",
                f"The name of a slice follows '{prefix}:'.",
                f"Pass for instance tpu='{prefix}:v5e:2x4'.",
            )
        # Only the name is validated: devices are searched at their first use.
        slice_of(rest)
        return tpu
    named = environ.get("TPU_NAME")
    own = f"is {named!r}" if named else "is not set"
    raise refuse(
        f"tpu={tpu!r}, which was not found. What was looked for: a TPU VM of that name, which "
        f"must be this machine; where: the environment variable TPU_NAME, which {own}.",
        "A program for TPUs runs on the TPU VM itself: TPUs of other machines, by name or by grpc "
        "address, cannot be reached from here.",
        "Start the program on that TPU VM and pass tpu='' there. Without a TPU pass "
        "'virtual:v5e:2x4' (CPU devices laid out as a slice) or 'described:v5e:2x4' (compile "
        "only).",
        kind=NotFoundError,
    )


# The ports in `TPU_PROCESS_ADDRESSES` are those of libtpu; JAX's processes connect at `_PORT`.
def _list_hosts(environ: Mapping[str, str]) -> list[str]:
    listed = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    return [host.strip().split(":")[0] for host in listed.split(",") if host.strip()]


def _find_task_id(environ: Mapping[str, str]) -> int:
    for name in ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0
