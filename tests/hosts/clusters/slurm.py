"""Slurm on hosts of their own: a controller on the first, and a daemon for the tasks on each."""

import contextlib
import dataclasses
import functools
import pathlib
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.hosts.clusters.daemons import start_daemon
from tests.hosts.hosts import Host, find_obstacle
from tests.launching.files.printed import clean_environment

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scancel")
_SECONDS_TO_START = 60.0
_MUNGE_FILES = {
    "socket": "munge.socket",
    "key-file": "munge.key",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "munged.seed",
}
_CONFIG = """
ClusterName=jaxdist
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@functools.cache
def find_missing() -> str:
    """Return why this machine cannot start Slurm on hosts; an empty text where it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return find_obstacle() or (f"Slurm is not installed: {', '.join(missing)}" if missing else "")


needs_slurm = pytest.mark.skipif(bool(find_missing()), reason=find_missing())


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm cluster; its commands run on the first host."""

    folder: pathlib.Path
    hosts: Sequence[Host]

    def call(self, *command: str, seconds: float = 120) -> "subprocess.CompletedProcess[str]":
        """Run a command of Slurm to its end."""
        return subprocess.run(
            self.hosts[0].enter(command),
            env=_make_environment(self.folder),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def submit(self, script: str, *options: str) -> str:
        """Give a batch script to Slurm, and return the number of its job."""
        done = self.call("sbatch", "--parsable", *options, script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait(self, job: str, seconds: float) -> tuple[str, int]:
        """Wait for the end of a job; return its state and its exit code."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.call("scontrol", "show", "job", job, "--oneliner").stdout
            fields = {name: value for name, _, value in (w.partition("=") for w in shown.split())}
            state = fields.get("JobState", "UNKNOWN")
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "UNKNOWN"):
                return state, int(fields["ExitCode"].partition(":")[0])
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} after {seconds:g} s: {self.describe()}")
            time.sleep(0.2)

    def describe(self) -> str:
        """Return the ends of the logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)


def _make_environment(folder: pathlib.Path) -> dict[str, str]:
    """Return the variables with which programs find the cluster."""
    return {**clean_environment(), "SLURM_CONF": str(folder / "slurm.conf")}


@contextlib.contextmanager
def start_slurm(hosts: Sequence[Host], folder: pathlib.Path, cores: int = 4) -> Iterator[Slurm]:
    """Start Slurm on hosts, and end it with everything that it has started.

    Args:
        hosts: Where. The controller is on the first.
        folder: For what Slurm writes; all hosts see it.
        cores: Cores of each node.
    """
    names = [host.name for host in hosts]
    config = _CONFIG.format(
        first=hosts[0],
        folder=folder,
        names=",".join(names),
        nodes="\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={cores} RealMemory=16000"
            for host in hosts
        ),
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = [f"--{kind}={folder / name}" for kind, name in _MUNGE_FILES.items()]
    with contextlib.ExitStack() as stack:

        def start(host: Host, *command: str) -> None:
            output = folder / f"{command[0]}-{host.name}.out"
            stack.enter_context(start_daemon(host, command, _make_environment(folder), output))

        start(hosts[0], "munged", "--foreground", "--force", *files)
        start(hosts[0], "slurmctld", "-D", "-i")
        for host in hosts:
            (folder / f"spool-{host.name}").mkdir()
            start(host, "slurmd", "-D", "-N", host.name)
        slurm = Slurm(folder, hosts)
        _wait_for_nodes(slurm, len(hosts))
        yield slurm


def _wait_for_nodes(slurm: Slurm, count: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while True:
        done = slurm.call("sinfo", "--noheader", "--Node", "--format=%T")
        if done.stdout.split() == ["idle"] * count:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{done.stdout}{done.stderr}{slurm.describe()}")
        time.sleep(0.2)
