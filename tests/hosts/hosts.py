"""Hosts of their own for tests: names, networks, cuts and firewalls, on one machine.

A host is a process that holds a network, a name and an `/etc/hosts` of its own (Linux namespaces);
all are connected by bridges in one more such process. Namespaces go with the process that holds
them, and the kernel ends it with its parent, so nothing is left behind, even by SIGKILL. Needs
root, iproute2 and nftables.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest

_TOOLS = ("ip", "nft", "tc", "unshare", "nsenter", "setpriv")
_LOCK = pathlib.Path(tempfile.gettempdir()) / "jaxdist-test-hosts.lock"
_COUNTED = "JAXDIST_TEST_HOSTS"
_SECONDS_TO_END = 20.0


@functools.cache
def find_obstacle() -> str:
    """Return why this machine cannot make hosts; an empty text where it can."""
    if os.geteuid() != 0:
        return "hosts for tests need root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"hosts for tests need {', '.join(missing)}" if missing else ""


needs_hosts = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


@dataclasses.dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: Its name.
        holder: Process that holds its namespaces.
        addresses: Its address on each network.
    """

    name: str
    holder: int
    addresses: tuple[str, ...]

    @property
    def address(self) -> str:
        """Its address on the first network."""
        return self.addresses[0]

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one on this host."""
        return _make_entry(self.holder, command)

    def write_names(self, lines: Sequence[str]) -> None:
        """Write the `/etc/hosts` of this host."""
        text = "".join(f"{line}\n" for line in lines)
        _enter(self.holder, ["tee", "/etc/hosts"], given=text)

    def cut(self, network: int = 0) -> None:
        """Drop all that goes to and from this host on a network, without a word to anybody."""
        rules = f"""
            table inet cut{network} {{
              chain in {{ type filter hook input priority 0; iifname "eth{network}" drop; }}
              chain out {{ type filter hook output priority 0; oifname "eth{network}" drop; }}
            }}
        """
        _enter(self.holder, ["nft", "-f", "-"], given=rules)

    def mend(self, network: int = 0) -> None:
        """Undo `cut`."""
        _enter(self.holder, ["nft", "delete", "table", "inet", f"cut{network}"])

    def open_only(self, *ports: int, answer: str = "drop") -> None:
        """Let new connections from other hosts come in at these ports only."""
        allowed = ", ".join(str(port) for port in ports)
        rules = f"""
            table inet firewall {{
              chain in {{
                type filter hook input priority 0;
                iifname "lo" accept
                ct state established,related accept
                tcp dport {{ {allowed} }} accept
                meta l4proto tcp {answer}
              }}
            }}
        """
        _enter(self.holder, ["nft", "-f", "-"], given=rules)

    def throttle(self, rate: str, network: int = 0) -> None:
        """Limit what this host sends, such as to `"1mbit"`."""
        limit = ["tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        _enter(self.holder, ["tc", "qdisc", "add", "dev", f"eth{network}", "root", *limit])


@contextlib.contextmanager
def make_hosts(count: int, networks: Sequence[str] = ("10.77.0.{}/24",)) -> Iterator[list[Host]]:
    """Make hosts that reach each other by address; each knows the names of all.

    One test at a time has hosts: each uses the cores of the machine for several processes.

    Args:
        count: Number of hosts. Host 0 is called `host0`.
        networks: Address of each host on each network, with `{}` for its number from 1.
    """
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_LOCK.open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        switch = stack.enter_context(_hold("switch"))
        for network in range(len(networks)):
            _enter(switch, ["ip", "link", "add", f"br{network}", "type", "bridge"])
            _enter(switch, ["ip", "link", "set", f"br{network}", "up"])
        hosts = []
        for number in range(count):
            holder = stack.enter_context(_hold(f"host{number}"))
            _enter(holder, ["ip", "link", "set", "lo", "up"])
            for network, pattern in enumerate(networks):
                _connect(switch, holder, number, network, pattern.format(number + 1))
            addresses = (pattern.format(number + 1).partition("/")[0] for pattern in networks)
            hosts.append(Host(f"host{number}", holder, tuple(addresses)))
        for host in hosts:
            known = [f"{other.address} {other.name}" for other in hosts]
            host.write_names(["127.0.0.1 localhost", *known])
        # `.ci/run` counts the tests that had hosts.
        if _COUNTED in os.environ:
            with pathlib.Path(os.environ[_COUNTED]).open("a") as file:
                file.write(os.environ.get("PYTEST_CURRENT_TEST", "no test") + "\n")
        yield hosts


def _connect(switch: int, holder: int, number: int, network: int, address: str) -> None:
    here, there = f"eth{network}", f"port{number}-{network}"
    pair = ["netns", str(holder), "type", "veth", "peer", "name", there, "netns", str(switch)]
    _run(["ip", "link", "add", here, *pair])
    _enter(switch, ["ip", "link", "set", there, "master", f"br{network}", "up"])
    # Without the detection of duplicates, an address of IPv6 can be used at once.
    options = ["nodad"] if ":" in address else []
    _enter(holder, ["ip", "address", "add", address, "dev", here, *options])
    _enter(holder, ["ip", "link", "set", here, "up"])


@contextlib.contextmanager
def _hold(name: str) -> Iterator[int]:
    """Start a process with namespaces of its own; they end with it, and it with this one."""
    with tempfile.NamedTemporaryFile(prefix="jaxdist-hosts-", suffix=".names") as names:
        script = (
            f"hostname {name} && mount --bind {names.name} /etc/hosts && "
            "echo ready && exec sleep infinity"
        )
        kinds = ["--net", "--uts", "--mount"]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", f"{name} did not start"
            yield process.pid
        finally:
            if process.poll() is None:
                end_processes_of(process.pid)
            process.kill()
            process.wait()
            process.stdout.close()


def end_processes_of(holder: int) -> None:
    """Kill what still runs in the network of a host, and wait for its end."""
    deadline = time.monotonic() + _SECONDS_TO_END
    network = os.readlink(f"/proc/{holder}/ns/net")
    while True:
        left = [pid for pid in _list_processes_in(network) if pid != holder]
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {left} did not end after SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _list_processes_in(network: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/net") == network:
                found.append(int(name))
    return found


def _enter(holder: int, command: Sequence[str], given: str = "") -> str:
    return _run(_make_entry(holder, command), given)


def _make_entry(holder: int, command: Sequence[str]) -> list[str]:
    return ["nsenter", "-t", str(holder), "-n", "-u", "-m", *command]


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
