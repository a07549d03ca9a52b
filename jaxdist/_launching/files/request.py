"""`Request`: what a job needs on a cluster."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.environment import check_devices, list_device_variables
from jaxdist._validate import as_integer
from jaxdist.errors import LaunchError

_CALLER = "jaxdist launch"
_MOST = 1_000_000
# With the parts that JobSet adds, names of pods stay below 63 characters.
_LONGEST_NAME = 40
# Variables that the job inherits from the command that prints its file.
_OF_THE_JOB = re.compile(
    r"XLA_FLAGS|JAXDIST_\w+_SECONDS|JAX_COMPILATION_CACHE_\w+|JAX_PERSISTENT_CACHE_\w+"
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclasses.dataclass(frozen=True)
class Request:
    """A job, and what it needs on a cluster.

    Args:
        arguments: The arguments after `python` in the command of each process.
        count: Number of processes.
        file: The script or the configuration among the arguments; None for a module.
        is_training: Whether the command is `jaxdist train`.
        devices: Number of GPUs of each process, or of CPU devices without `gpu`; None for one.
        restarts: How often all processes start again after a failure.
        name: Name of the job; None for that of the script.
        gpu: Kind of the GPUs, `any` for every kind; None for CPUs.
        image: Container image.
        install: What pip installs as jaxdist: a requirement, a URL or a path.
        cpus: CPU cores of each process.
        memory: GiB of each process.
        hosts: Number of machines.
        partition: Partition of Slurm.
        time: Time limit, `hours:minutes:seconds` or with `days-` before it.
        packages: Further packages of the job; pip installs the versions of this environment.

    Raises:
        ArgumentError: A number is out of range, the processes cannot be divided evenly among the
            hosts, `image` and `install` are both given, or `time` or `name` is not valid.
        LaunchError: XLA_FLAGS also gives the number of devices.
    """

    arguments: Sequence[str]
    count: int
    file: str | None = None
    is_training: bool = False
    devices: int | None = None
    restarts: int = 0
    name: str | None = None
    gpu: str | None = None
    image: str | None = None
    install: str | None = None
    cpus: int | None = None
    memory: int | None = None
    hosts: int | None = None
    partition: str | None = None
    time: str | None = None
    packages: Sequence[str] = ()

    @called(_CALLER)
    def __post_init__(self) -> None:
        as_integer("-n", self.count, least=1, most=_MOST, example=2)
        as_integer("restarts", self.restarts, least=0)
        for name, number in (
            ("devices_per_process", self.devices),
            ("--cpus", self.cpus),
            ("--memory", self.memory),
            ("--hosts", self.hosts),
        ):
            if number is not None:
                as_integer(name, number, least=1, most=_MOST)
        if self.hosts is not None and self.count % self.hosts:
            raise refuse(
                f"{self.count} processes and --hosts {self.hosts}.",
                "Each host gets the same number of processes.",
                f"Pass -n {self.hosts * -(-self.count // self.hosts)}, or another --hosts.",
            )
        if self.image is not None and self.install is not None:
            raise refuse(
                f"--image {self.image} and --install {self.install}.",
                "An image has jaxdist already; without one, pip installs it.",
                "Leave out one of the two.",
            )
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise refuse(
                f"--time {self.time}.",
                "A time is hours:minutes:seconds, or days-hours:minutes:seconds.",
                "Pass for instance --time 2:30:00.",
            )
        if self.name is not None and self.name != _make_name(self.name):
            raise refuse(
                f"--name {self.name}.",
                f"A name has at most {_LONGEST_NAME} small letters, digits and hyphens, and "
                "begins with a letter.",
                f"Pass for instance --name {_make_name(self.name)}.",
            )
        if self.gpu is None:
            check_devices(self.devices, os.environ)

    @property
    def job_name(self) -> str:
        """Name of the job."""
        if self.name is not None:
            return self.name
        return _make_name(pathlib.Path(self.file).stem if self.file else self.arguments[1])

    @property
    def position(self) -> int:
        """Position of the file among the arguments: 0, unless a configuration follows options."""
        return list(self.arguments).index(self.file or "")

    @property
    def devices_of_each(self) -> int:
        """Number of devices of each process."""
        return self.devices or 1

    @property
    def processes_of_host(self) -> int:
        """Number of processes of each host."""
        return self.count // (self.hosts or 1)

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        match = _TIME.fullmatch(self.time) if self.time is not None else None
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def requirements(self) -> list[str]:
        """What pip installs for the job; jaxdist, JAX and `packages` in the versions used here."""
        jax = "jax[cuda13]" if self.gpu is not None else "jax"
        version = importlib.metadata.version
        # The tasks of `jaxdist train` use these.
        examples = ["matplotlib", "scikit-learn"] if self.is_training else []
        ours = self.install or f"jaxdist=={version('jaxdist')}"
        more = [f"{name}=={version(name)}" for name in self.packages]
        return [ours, f"{jax}=={version('jax')}", *examples, *more]

    def list_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that every process gets.

        Args:
            environ: The environment of this command. The job inherits its XLA_FLAGS, the times of
                jaxdist (`JAXDIST_..._SECONDS`), and the settings of JAX's compilation cache.
        """
        found = {"PYTHONUNBUFFERED": "1"}
        if self.gpu is None:
            found["JAX_PLATFORMS"] = "cpu"
            found |= list_device_variables(self.devices_of_each, environ)
        for name, value in sorted(environ.items()):
            if _OF_THE_JOB.fullmatch(name):
                found[name] = value
        return found

    def refuse_options(self, target: str, **reasons: str) -> None:
        """Raise if an option was given that a target does not support.

        Args:
            target: Where the job would run.
            **reasons: For each unsupported option, why, and what to do instead.

        Raises:
            LaunchError: One of these options was given.
        """
        for option, reason in reasons.items():
            given = getattr(self, option)
            if given is not None:
                raise LaunchError(
                    f"{_CALLER} --print {target} was given --{option} {given}.\n\n{reason}"
                )


def _make_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}"
    return name[:_LONGEST_NAME].strip("-")


# The extra `grpcio` of jaxdist installs these: tasks use gRPC.
_PACKAGES = ("grpcio", "grpcio-health-checking", "flatbuffers", "zlib-ng")


@dataclasses.dataclass(frozen=True)
class TaskRequest:
    """A job with parameter servers, and what it needs on a cluster.

    Args:
        request: The job: what the chief runs, and the total number of tasks.
        server_arguments: The arguments after `python` in the command of the other tasks.
        ps: Number of parameter servers.
        workers: Number of workers.
        snapshot_directory: Where snapshots are kept; None for a place that ends with the job.
    """

    request: Request
    server_arguments: Sequence[str]
    ps: int
    workers: int
    snapshot_directory: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each job."""
        return {"chief": 1, "ps": self.ps, "worker": self.workers}

    def make_part(self, job: str) -> Request:
        """Return what the tasks of one job run and need. Only workers get GPUs."""
        part = dataclasses.replace(self.request, packages=_PACKAGES, count=self.counts[job])
        if job != "worker":
            part = dataclasses.replace(part, gpu=None, devices=None)
        if job == "chief":
            return part
        arguments = list(self.server_arguments)
        if arguments == list(part.arguments):
            return part
        # `jaxdist server` needs neither the script nor the packages of a training.
        name = part.job_name
        return dataclasses.replace(
            part, arguments=arguments, file=None, is_training=False, name=name
        )


# Any other string is written in quotes. Words such as `yes` and `null` would not be strings.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def write_yaml(value: Any) -> str:
    """Return dicts, lists, strings, numbers and booleans as a YAML document.

    Strings of several lines are written as blocks, which are easier to read.
    """
    return "\n".join(_write(value, 0)) + "\n"


def _write(value: Any, indent: int) -> list[str]:
    space = " " * indent
    lines: list[str] = []
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            lines += _write_entry(f"{space}{_write_text(key)}:", entry, indent)
    elif isinstance(value, list) and value:
        for entry in value:
            if _is_full(entry):
                first, *rest = _write(entry, indent + 2)
                lines += [f"{space}- {first[indent + 2 :]}", *rest]
            else:
                lines.append(f"{space}- {_write_scalar(entry, indent)}")
    else:
        lines.append(space + _write_scalar(value, indent))
    return lines


def _is_full(value: Any) -> bool:
    return bool(value) and not isinstance(value, str | int | float)


def _write_entry(start: str, entry: Any, indent: int) -> list[str]:
    if _is_full(entry):
        return [start, *_write(entry, indent + 2)]
    return [f"{start} {_write_scalar(entry, indent)}"]


def _write_scalar(value: Any, indent: int) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    lines = value.split("\n")
    if len(lines) > 1 and all(line.replace("\t", "").isprintable() for line in lines):
        # `2` is the indentation of the block: its first line may begin with spaces.
        end = "-" if lines[-1] else "+" if not lines[-2] else ""
        body = lines if lines[-1] else lines[:-1]
        space = " " * (indent + 2)
        return "\n".join([f"|2{end}", *(space + line if line else "" for line in body)])
    return _write_text(value)


def _write_text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    written = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in value)
    return '"' + "".join({'"': '\\"', "\\": "\\\\"}.get(c, c) for c in written) + '"'
