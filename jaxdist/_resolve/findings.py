"""Finds what looks wrong in a job, with one function for each check."""

import dataclasses
import functools
import itertools
import socket
from collections.abc import Iterator, Mapping

from jaxdist import _processes
from jaxdist._called import called
from jaxdist.cluster_resolver import describe_unused_sign


class Network(_processes.Machine):
    """Looks up names and ports on this machine."""

    def get_host_name(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def is_used(self, host: str, port: int) -> bool:
        """Whether this process could not listen at an address because the port is in use."""
        try:
            server = _processes.listen(host, port)
        except OSError:
            return True
        if server is not None:
            server.close()
        return False

    def is_listening(self, host: str, port: int) -> bool:
        """Whether something accepts connections at an address. This opens a connection."""
        return _processes.is_listening(host, port)

    def find_bind_address(self, addresses: list[str]) -> str:
        """Return where process 0, on this machine, would host JAX's coordination service."""
        return _processes.find_bind_address(addresses)


ERROR, WARNING = "error", "warning"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that looks wrong; with an `error`, the job cannot start."""

    level: str
    text: str


@dataclasses.dataclass(frozen=True)
class Situation:
    """The data that the checks look at.

    Attributes:
        environ: The environment of this process.
        network: Names and ports.
        tasks: The addresses of the processes that train together, by task, in process order.
        index: Which of them this process is; None if it is not among them.
        probe: Whether to connect to process 0.
    """

    environ: Mapping[str, str]
    network: Network
    tasks: Mapping[tuple[str, int], str]
    index: int | None
    probe: bool

    @property
    @called("jaxdist resolve")
    def places(self) -> list[tuple[str, int]]:
        """Host and port of each process."""
        return [_processes.split_address(a) for a in self.tasks.values()]

    @functools.cached_property
    def own(self) -> _processes.OwnAddress | None:
        """The address of this process for collectives; None if it cannot be found."""
        if self.index is None:
            return None
        service = self.environ.get(_processes.SERVICE, "")
        addresses = list(self.tasks.values())
        return _processes.find_own_address(addresses, self.index, service, self.network)

    @property
    def hosts(self) -> list[str]:
        """The hosts, each once."""
        return list(dict.fromkeys(host for host, _ in self.places))


def list_findings(situation: Situation) -> list[Finding]:
    """Return everything that looks wrong, errors first."""
    found = list(itertools.chain.from_iterable(check(situation) for check in _CHECKS))
    return sorted(found, key=lambda finding: finding.level != ERROR)


def _check_twice(s: Situation) -> Iterator[Finding]:
    by_address: dict[tuple[str, int], list[str]] = {}
    for (job, i), place in zip(s.tasks, s.places, strict=True):
        by_address.setdefault(place, []).append(f"{job} {i}")
    for (host, port), tasks in by_address.items():
        if len(tasks) > 1:
            yield Finding(
                ERROR,
                f"{' and '.join(tasks)} share one address, {host}:{port}. Each process listens at "
                "its own: give the processes of one host different ports.",
            )


def _check_loopback(s: Situation) -> Iterator[Finding]:
    own = [host for host in s.hosts if _processes.is_loopback(host)]
    if own and len(own) < len(s.hosts):
        others = [host for host in s.hosts if host not in own]
        yield Finding(
            ERROR,
            f"On every host, {own[0]} is that host itself, and {others[0]} is another host. Write "
            "names that all hosts know.",
        )


def _check_names(s: Situation) -> Iterator[Finding]:
    # Debian maps a host's own name to 127.0.1.1, which other hosts do not see.
    fine = s.places[s.index][0] if s.index is not None and s.own is not None else None
    for host in s.hosts:
        found = s.network.find_addresses(host)
        if not found:
            yield Finding(
                ERROR,
                f"The name {host} has no address here. In Kubernetes, names of pods come with a "
                "headless service, and some seconds after the pods.",
            )
        elif len(s.hosts) > 1 and not _processes.is_loopback(host) and host != fine:
            loopback = [address for address in found if _processes.is_loopback(address)]
            if loopback and len(loopback) == len(found):
                yield Finding(
                    WARNING,
                    f"The name {host} is {loopback[0]} here, which no other host can reach. Take "
                    "it out of this line of /etc/hosts, or write the host's address.",
                )


def _check_collectives(s: Situation) -> Iterator[Finding]:
    """Check the address of the host's name, which JAX uses if none in the cluster can be used."""
    if s.index is None or len(s.tasks) < 2 or s.own is not None:
        return
    name = s.network.get_host_name()
    found = s.network.find_addresses(name)
    if not found:
        yield Finding(
            ERROR,
            f"This process has no address for collectives: {s.places[s.index][0]} is not an "
            f"address of this machine, no other process can be reached, and the host name {name} "
            "has no address. Write an address of this machine into the cluster.",
        )
    elif _processes.is_loopback(found[0]) and len(s.hosts) > 1:
        yield Finding(
            WARNING,
            f"Collectives would use {found[0]}, the address of the host name {name}, which no "
            "other host can reach. Write an address of this machine into the cluster.",
        )


def _check_interface(s: Situation) -> Iterator[Finding]:
    name = _processes.INTERFACE
    chosen = s.environ.get(name)
    if not chosen or s.own is None or not s.network.has_gpus() or len(s.hosts) < 2:
        return
    interface = s.network.find_interface(s.own.address)
    if interface is not None and not _processes.is_chosen(interface, chosen):
        yield Finding(
            WARNING,
            f"{name}={chosen}, and {s.own.address}, the address of this process, belongs to "
            f"{interface}: collectives between GPUs (NCCL) use another network than the one of "
            f"the cluster. Unset {name}, unless that is what you want.",
        )


def _check_own_address(s: Situation) -> Iterator[Finding]:
    if s.index is None or len(s.tasks) < 2:
        return
    host, port = s.places[s.index]
    if not s.network.find_addresses(host):
        return
    if not s.network.is_own(host):
        yield Finding(
            WARNING,
            f"This process would be at {host}, which is not an address of this machine. That is "
            "right only behind a service or a proxy.",
        )
    elif s.network.is_used(host, port):
        yield Finding(
            ERROR,
            f"Port {port} of {host}, which this process needs, is in use. Choose another port for "
            f"all processes, or end what listens there (`ss -ltnp 'sport = :{port}'`).",
        )


_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def _check_proxies(s: Situation) -> Iterator[Finding]:
    names = [n for name in _PROXIES for n in (name, name.upper()) if s.environ.get(n)]
    hosts = [host for host in s.hosts if not _processes.is_loopback(host)]
    skipped = [
        entry.strip().removeprefix("*").lstrip(".")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy")
        for entry in s.environ.get(name, "").split(",")
        if entry.strip()
    ]
    if "*" in s.environ.get("no_proxy", "").split(","):
        return
    left = [h for h in hosts if not any(h == e or h.endswith(f".{e}") for e in skipped)]
    if names and left and len(s.tasks) > 1:
        yield Finding(
            WARNING,
            f"{names[0]}={_hide_password(s.environ[names[0]])}: connections to {left[0]} may go to "
            f"the proxy, and hang. Unset it for the job, or set no_proxy={','.join(left[:4])}.",
        )


def _hide_password(url: str) -> str:
    scheme, at, rest = url.rpartition("@")
    return f"{scheme.partition('//')[0]}//***@{rest}" if at else url


def _check_slurm(s: Situation) -> Iterator[Finding]:
    job, env = s.environ.get("SLURM_JOB_ID"), s.environ
    if job is None:
        return
    if "SLURM_STEP_ID" not in env and "SLURM_STEP_NUM_TASKS" not in env:
        yield Finding(
            WARNING,
            f"This process is in Slurm's job {job}, but not in a step of it: without `srun`, only "
            "one process starts, on the first host.",
        )
        return
    wanted, started = env.get("SLURM_NTASKS"), env.get("SLURM_STEP_NUM_TASKS")
    if wanted and started and wanted != started:
        yield Finding(
            WARNING,
            f"SLURM_NTASKS={wanted} and SLURM_STEP_NUM_TASKS={started}: the job requested "
            "another number of tasks than this step of `srun` has.",
        )


# Variables of other programs: number of this process, number of processes.
_SAYS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def _check_contradictions(s: Situation) -> Iterator[Finding]:
    if s.index is None:
        return
    for name, found in [
        pair
        for index, count in _SAYS
        # A step of one task is a shell that starts everything else.
        if s.environ.get(count) != "1"
        for pair in ((index, s.index), (count, len(s.tasks)))
    ]:
        said = s.environ.get(name, str(found))
        if said != str(found):
            yield Finding(
                WARNING,
                f"{name}={said} contradicts the cluster, in which it would be {found}. One of "
                "the two is wrong or meant for another job.",
            )
    said = s.environ.get("JAX_COORDINATOR_ADDRESS")
    first = next(iter(s.tasks.values()))
    if said and said != first and len(s.tasks) > 1:
        yield Finding(
            WARNING,
            f"JAX_COORDINATOR_ADDRESS={said} and process 0 is at {first}. jaxdist uses the second.",
        )


def _check_unused_sign(s: Situation) -> Iterator[Finding]:
    if len(s.tasks) < 2 and (sign := describe_unused_sign(s.environ)):
        yield Finding(WARNING, sign)


def _check_process_0(s: Situation) -> Iterator[Finding]:
    if not s.probe or s.index in (None, 0):
        return
    host, port = s.places[0]
    if s.network.find_addresses(host) and not s.network.is_listening(host, port):
        yield Finding(
            WARNING,
            f"Nothing listens at {host}:{port}, the address of process 0. Start it, or look for a "
            "firewall.",
        )


_CHECKS = (
    _check_twice,
    _check_loopback,
    _check_names,
    _check_collectives,
    _check_interface,
    _check_own_address,
    _check_proxies,
    _check_slurm,
    _check_contradictions,
    _check_unused_sign,
    _check_process_0,
)
