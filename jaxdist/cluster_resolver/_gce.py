"""`GCEClusterResolver`: the machines of an instance group of Google Compute Engine."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, final

from jaxdist._called import called, refuse
from jaxdist._metadata_server import make_url, read_metadata
from jaxdist._validate import as_integer, check_callable, check_text, show
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import ListingResolver, check_task
from jaxdist.errors import ClusterError, ContextError, MissingExtraError

_CALLER = "GCEClusterResolver"
_OWN_ADDRESS = "instance/network-interfaces/0/ip"


@final
class GCEClusterResolver(ListingResolver):
    """A resolver for the machines of an instance group of Google Compute Engine.

    The machines are sorted by address, as strings. All are tasks of one job.

    Args:
        project: The project of the group.
        zone: Its zone.
        instance_group: Its name.
        port: The port of all addresses.
        task_type: The job of the machines.
        task_id: The number of this machine in the job. None finds it: the position of this
            machine's address, from the metadata server, among those of the group.
        rpc_layer: The protocol prefix of addresses.
        credentials: Credentials for Google's API; the default is the account of the machine.
        service: A client of the API, from `googleapiclient.discovery.build('compute', 'v1')`.
        metadata: A function from a path to the answer of the metadata server, which replaces it.

    Raises:
        MissingExtraError: `service` is None, and google-api-python-client is not installed.
        ArgumentError: `service` is not a client of the API.

    Example:
        >>> class Request:
        ...     def __init__(self, answer): self.execute = lambda: answer
        >>> class Groups:
        ...     def listInstances(self, **_): return Request({"items": [{"instance": "x/vm-1"}]})
        ...     def listInstances_next(self, **_): return None
        >>> class Instances:
        ...     def get(self, **_):
        ...         return Request({"networkInterfaces": [{"networkIP": "10.0.0.2"}]})
        >>> class Service:
        ...     def instanceGroups(self): return Groups()
        ...     def instances(self): return Instances()
        >>> resolver = jaxdist.cluster_resolver.GCEClusterResolver(
        ...     "project", "us-west1-a", "group", 8470, service=Service())
        >>> resolver.cluster_spec(), resolver.master()
        (ClusterSpec({'worker': ['10.0.0.2:8470']}), 'grpc://10.0.0.2:8470')

    Source:
        `tf.distribute.cluster_resolver.GCEClusterResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
        *,
        metadata: Callable[[str], str] | None = None,
    ) -> None:
        check_text("project", project, "my-project")
        check_text("zone", zone, "us-west1-a")
        check_text("instance_group", instance_group, "my-group")
        self._port = as_integer("port", port, least=1, most=65535, example=8470)
        check_text("task_type", task_type, "worker")
        check_task(task_type, task_id, rpc_layer)
        if metadata is not None:
            check_callable(metadata, "metadata")
        self._where = {"project": project, "zone": zone}
        self._group = instance_group
        self._task_type = task_type
        self._task_id = task_id
        self.rpc_layer = rpc_layer
        self._metadata = metadata or _ask_metadata_server
        if service is None:
            service = _make_service(credentials)
        elif not hasattr(service, "instanceGroups") or not hasattr(service, "instances"):
            raise refuse(
                f"service={show(service)}.",
                "service is a client of the Compute Engine API.",
                "Pass googleapiclient.discovery.build('compute', 'v1').",
            )
        self._service = service

    def cluster_spec(self) -> ClusterSpec:
        """Return the running machines of the group, listed at each call."""
        addresses = sorted(f"{ip}:{self._port}" for ip in self._list_addresses())
        return ClusterSpec({str(self._task_type): addresses})

    @property
    def task_type(self) -> str | None:
        """The job of the machines."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ContextError(
            f"{_CALLER}.task_type was set to {task_type!r}.\n\n"
            f"It is set when the resolver is made, to {self._task_type!r}.\n\n"
            f"Make another resolver: {_CALLER}(..., task_type={task_type!r})."
        )

    def _find_task_id(self) -> int:
        own = self._metadata(_OWN_ADDRESS).strip()
        addresses = self.cluster_spec().as_dict()[str(self._task_type)]
        listed = list(addresses) if isinstance(addresses, list) else []
        if f"{own}:{self._port}" not in listed:
            raise ClusterError(
                f"{_CALLER} has task_id=None, and this machine, {own}, is not one of "
                f"the {len(listed)} machines of {self._group!r}: {listed[:8]}.\n\n"
                "task_id=None uses the position of this machine in the group.\n\n"
                "Pass task_id, or start the program on the machines of the group."
            )
        self._task_id = listed.index(f"{own}:{self._port}")
        return self._task_id

    def _list_addresses(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._where,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            response = request.execute()
            # The API leaves the key out of an empty page.
            for item in response.get("items", ()):
                name = item["instance"].rpartition("/")[2]
                details = self._service.instances().get(**self._where, instance=name).execute()
                yield details["networkInterfaces"][0]["networkIP"]
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )


def _make_service(credentials: Any) -> Any:
    try:
        discovery: Any = importlib.import_module("googleapiclient.discovery")
    except ImportError:
        raise refuse(
            "no service, so it asks Google's API itself, and the package google-api-python-client "
            "is not installed.",
            "jaxdist is installed without its optional packages.",
            "Install it with: pip install google-api-python-client",
            kind=MissingExtraError,
        ) from None
    is_default = isinstance(credentials, str) and credentials == "default"
    # The library itself finds the account of the machine.
    return discovery.build("compute", "v1", credentials=None if is_default else credentials)


def _ask_metadata_server(path: str) -> str:
    try:
        return read_metadata(path)
    except OSError as error:
        raise ClusterError(
            f"{_CALLER} has task_id=None, and could not read {make_url(path)}: {error}.\n\n"
            "task_id=None reads the address of this machine from the metadata server, which only "
            "machines of Google Compute Engine have.\n\nPass task_id."
        ) from error
