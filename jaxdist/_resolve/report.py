"""`Report`: which task this process would be in its job, and what looks wrong."""

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

from jaxdist import _processes
from jaxdist._called import called
from jaxdist._cluster import Task, find_task
from jaxdist._resolve.findings import ERROR, Finding, Network, Situation, list_findings
from jaxdist.cluster_resolver import ENVIRONMENTS, ClusterResolver, find_source


def choose_source(environ: MutableMapping[str, str]) -> str:
    """Return the environment that strategies use; `tf_config` for a process that is alone.

    See Note [Which cluster a process is in].
    """
    found = find_source(environ).name
    return found if found in ENVIRONMENTS else "tf_config"


def make_resolver(
    source: str,
    environ: MutableMapping[str, str],
    task_type: str | None = None,
    task_id: int | None = None,
    **options: Any,
) -> ClusterResolver:
    """Return the resolver of an environment.

    Args:
        source: The name of the environment.
        environ: The variables, which are not changed.
        task_type: The job of this process, if it is another than the resolver says.
        task_id: Its number, if it is another than the resolver says.
        **options: What the environment does not contain.

    Raises:
        ArgumentError: For `gce`, the project, the zone or the instance group is missing.
        JaxdistError: The resolver raises an error.
    """
    environment = ENVIRONMENTS[source]
    if environment.has_task:
        options |= {"task_type": task_type, "task_id": task_id}
        task_type = task_id = None
    resolver = environment.make(dict(environ), **options, **environment.when_shown)
    # Before the task is set: in this call a resolver may set it.
    resolver.cluster_spec()
    if task_type is not None:
        resolver.task_type = task_type
    if task_id is not None:
        resolver.task_id = task_id
    return resolver


CALLER = "jaxdist resolve"


@dataclasses.dataclass(frozen=True)
class Report:
    """Which task this process would be, and what looks wrong.

    Attributes:
        lines: Pairs of a title and a value.
        findings: What looks wrong, errors first.
    """

    lines: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """2 with errors, 1 with only warnings, 0 otherwise."""
        if any(finding.level == ERROR for finding in self.findings):
            return 2
        return int(bool(self.findings))


@called(CALLER)
def make_report(
    source: str,
    resolver: ClusterResolver,
    environ: Mapping[str, str],
    network: Network,
    *,
    probe: bool = False,
) -> Report:
    """Return which task this process would be, and what looks wrong.

    Args:
        source: Where the tasks come from.
        resolver: The resolver that reads the source.
        environ: The environment of this process.
        network: Names and ports.
        probe: Whether to connect to process 0.

    Raises:
        ClusterError: This process is not one of the tasks, or the cluster is not valid.
    """
    task = find_task(resolver)
    situation = Situation(environ, network, task.training, task.number, probe)
    lines = [("this process", _describe_own(task))]
    if task.job is not None:
        lines.insert(0, ("found in", source))
    if len(task.training) > 1:
        (job, index), address = next(iter(task.training.items()))
        lines.append(("process 0", f"{job} {index}, {address}"))
        if task.number is not None:
            lines.append(("JAX's service", _describe_service(situation)))
            lines.append(("gloo", _describe_gloo(situation)))
            if network.has_gpus():
                lines.append((_processes.INTERFACE, _describe_interface(situation)))
    return Report(tuple(lines), tuple(list_findings(situation)))


def _describe_own(task: Task) -> str:
    if task.job is None:
        return "process 0 of 1: no cluster was found"
    own, count = f"{task.job} {task.index}", len(task.training)
    if task.number is None:
        return f"{own}, which is not one of the {count} processes that train together"
    return f"{own}, process {task.number} of {count}, {list(task.training.values())[task.number]}"


def _describe_service(situation: Situation) -> str:
    launcher = situation.environ.get(_processes.SERVICE)
    if launcher:
        return f"{launcher}, hosted by the launcher"
    addresses = list(situation.tasks.values())
    host, port = situation.places[0]
    if all(_processes.is_loopback(h) for h in situation.hosts):
        return f"{situation.network.find_bind_address(addresses)}, as all addresses are loopback"
    if situation.index != 0:
        return f"{host}:{port}, bound by process 0"
    return f"{situation.network.find_bind_address(addresses)}, bound by this process"


def _describe_gloo(situation: Situation) -> str:
    if situation.own is not None:
        return f"{situation.own.address}, {situation.own.reason}"
    name = situation.network.get_host_name()
    found = situation.network.find_addresses(name)
    return f"{found[0] if found else 'no address'}, from the host name {name}"


def _describe_interface(situation: Situation) -> str:
    chosen = situation.environ.get(_processes.INTERFACE)
    if chosen:
        return f"{chosen}, from the environment"
    own = situation.own
    if own is None or _processes.is_loopback(own.address):
        return "not set: NCCL chooses"
    interface = situation.network.find_interface(own.address)
    if interface is None:
        return "not set: NCCL chooses"
    return f"={interface}, the interface of {own.address}"
