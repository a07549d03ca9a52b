"""Chooses the cluster of this process: the only place that decides where to read its tasks."""

import dataclasses
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from jaxdist._called import called, refuse
from jaxdist.cluster_resolver._gce import GCEClusterResolver
from jaxdist.cluster_resolver._kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from jaxdist.cluster_resolver._resolver import ClusterResolver
from jaxdist.cluster_resolver._slurm import SlurmClusterResolver
from jaxdist.cluster_resolver._tf_config import TFConfigClusterResolver
from jaxdist.cluster_resolver._tpu import TPUClusterResolver
from jaxdist.errors import ClusterError

# Note [Which cluster a process is in]
# Strategies, tasks of `jaxdist train`, Estimator, servers and `jaxdist resolve` call `find_source`,
# and make the resolver by `ENVIRONMENTS`, so that all give the same answer. A resolver that the
# program passes comes first. Then come `TF_CONFIG`, `JAXDIST_CLUSTER`, a step of Slurm with several
# tasks, and a TPU pod of several hosts. A batch script of Slurm is one process: it has
# `SLURM_NTASKS`, but no step. Variables of other launchers are only a sign: they do not say where
# the other processes are, and independent programs also run under them.

CLUSTER = "JAXDIST_CLUSTER"
# Below the ports that Linux assigns to programs that ask for any port. Each step has a block of
# ports, so that two steps on one host seldom use the same ones.
_FIRST_PORT, _BLOCKS, _BLOCK = 10240, 320, 64
_PORT = 8470
# Variable with the number of processes that another launcher has started, and the launcher's name.
_COUNTS = (
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "mpiexec"),
    ("SKYPILOT_NUM_NODES", "SkyPilot"),
    ("WORLD_SIZE", "torchrun"),
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the tasks of a job are described.

    Attributes:
        name: `tf_config`, `slurm`, `kubernetes` or `tpu`; `none` for a process that is alone.
        because: The variable that decides, with its value if that is short; "" if there is none.
    """

    name: str
    because: str


def find_source(environ: Mapping[str, str]) -> Source:
    """Return where the tasks of this process are described.

    See Note [Which cluster a process is in].

    Args:
        environ: The environment of the process.

    Raises:
        ClusterError: `JAXDIST_CLUSTER` is not `slurm`, `kubernetes` or `none`.

    Example:
        >>> from jaxdist.cluster_resolver import find_source
        >>> find_source({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})
        Source(name='slurm', because='SLURM_STEP_NUM_TASKS=2')
        >>> find_source({}).name
        'none'

    Source:
        An addition. `tf.distribute` reads only `TF_CONFIG`.
    """
    chosen = environ.get(CLUSTER, "").strip()
    if "TF_CONFIG" in environ:
        return Source("tf_config", "TF_CONFIG")
    if chosen:
        words = {name: found.word for name, found in ENVIRONMENTS.items() if found.word}
        if chosen not in (*words, "none"):
            ways = ", ".join(f"{CLUSTER}={name} {where}" for name, where in words.items())
            raise ClusterError(
                f"The environment variable {CLUSTER} is {chosen!r}.\n\n"
                f"It says where the processes of the job are described, {' or '.join(words)}, or "
                f"that this process is alone, none.\n\nSet {ways}, or unset it to use TF_CONFIG."
            )
        return Source(chosen, f"{CLUSTER}={chosen}")
    for name, environment in ENVIRONMENTS.items():
        if because := environment.find(environ):
            return Source(name, because)
    return Source("none", "")


def describe_unused_sign(environ: Mapping[str, str]) -> str:
    """Return a warning if a process works alone but seems to be one of several; else "".

    Args:
        environ: The environment of the process.

    Example:
        >>> from jaxdist.cluster_resolver import describe_unused_sign
        >>> describe_unused_sign({"OMPI_COMM_WORLD_SIZE": "2"})[:67]
        'OMPI_COMM_WORLD_SIZE=2 (mpirun) says that there are other processes'
        >>> describe_unused_sign({})
        ''

    Source:
        An addition.
    """
    if find_source(environ) != Source("none", ""):
        return ""
    if (launcher := next((x for x in _COUNTS if _read_count(environ, x[0]) > 1), None)) is not None:
        (name, what), way = launcher, "TF_CONFIG in each process"
    elif "JOB_COMPLETION_INDEX" in environ:
        name, what = "JOB_COMPLETION_INDEX", "an indexed Job of Kubernetes"
        way = f"{CLUSTER}=kubernetes"
    else:
        return ""
    return (
        f"{name}={environ[name]} ({what}) says that there are other processes, and it does not say "
        f"where. So this process works alone. To train with the others, set {way}. To work alone "
        f"without this warning, set {CLUSTER}=none."
    )


def choose_resolver(environ: MutableMapping[str, str] | None = None) -> ClusterResolver:
    """Return the resolver of the cluster of this process.

    The environment variable `TF_CONFIG` comes first. Then comes `JAXDIST_CLUSTER`: `slurm`,
    `kubernetes`, or `none` for a process that is alone. Then come a step of Slurm (`srun`) with
    several tasks, and a TPU pod with several hosts. Without any of them the process is alone.

    Args:
        environ: The environment; None for that of this process.

    Raises:
        ClusterError: `JAXDIST_CLUSTER` is not `slurm`, `kubernetes` or `none`, or the variables
            that the resolver reads are not valid.

    Example:
        >>> from jaxdist.cluster_resolver import choose_resolver
        >>> choose_resolver({}).cluster_spec().as_dict()  # alone
        {}
        >>> choose_resolver({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}).cluster_spec().jobs
        ['worker']

    Source:
        `tf.distribute.MultiWorkerMirroredStrategy`, whose default is `TF_CONFIG`; the rest is an
        addition.
    """
    own = os.environ if environ is None else environ
    source = find_source(own).name
    return ENVIRONMENTS.get(source, ENVIRONMENTS["tf_config"]).make(own)


def _read_count(environ: Mapping[str, str], name: str) -> int:
    """Return the integer in an environment variable, or 0 if it holds none."""
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else 0


def choose_slurm_port(environ: Mapping[str, str]) -> int:
    """Return the first port of a host, from the numbers of the job and of its step.

    Jobs that share a host get different ports, and so does each `srun` of a job.

    Args:
        environ: The variables of Slurm.

    Example:
        >>> from jaxdist.cluster_resolver import choose_slurm_port
        >>> choose_slurm_port({"SLURM_JOB_ID": "33", "SLURM_STEP_ID": "0"})
        25024

    Source:
        JAX's own detection of Slurm also computes its port from the number of the job.
    """
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    return _FIRST_PORT + (job * 7 + step) % _BLOCKS * _BLOCK


def _find_step(environ: Mapping[str, str]) -> str:
    if "SLURM_STEP_ID" not in environ or _read_count(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return ""
    return f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']}"


def _make_slurm(
    environ: MutableMapping[str, str], port: int | None = None, gpus_per_node: int | None = None
) -> ClusterResolver:
    port_base = port or choose_slurm_port(environ)
    return SlurmClusterResolver(port_base=port_base, gpus_per_node=gpus_per_node, environ=environ)


def _make_kubernetes(
    environ: Mapping[str, str],
    port: int | None = None,
    label: Sequence[str] = (),
    off_cluster: bool = False,
    **of_indexed_job: Any,
) -> ClusterResolver:
    return KubernetesClusterResolver(
        {"worker": list(label)} if label else None,
        port or _PORT,
        executable_location=KubernetesExecutableLocation(int(off_cluster)),
        environ=environ,
        **of_indexed_job,
    )


@called("--from gce")
def _make_gce(
    environ: Mapping[str, str],
    port: int | None = None,
    project: str | None = None,
    zone: str | None = None,
    instance_group: str | None = None,
    task_type: str | None = None,
    task_id: int | None = None,
) -> ClusterResolver:
    if project is None or zone is None or instance_group is None:
        raise refuse(
            f"--project {project}, --zone {zone} and --instance-group {instance_group}.",
            "An instance group has all three.",
            "Pass --project my-project --zone us-west1-a --instance-group my-group.",
        )
    port, task_type = port or _PORT, task_type or "worker"
    return GCEClusterResolver(project, zone, instance_group, port, task_type, task_id)


def _find_hosts(environ: Mapping[str, str]) -> str:
    for variable in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if len([host for host in environ.get(variable, "").split(",") if host.strip()]) > 1:
            return variable
    return ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment in which jobs run, and the resolver of its tasks.

    Attributes:
        make: Makes the resolver from the variables; its keyword arguments are what the environment
            does not contain.
        find: Returns the variable that shows the environment, with its value if that is short; ""
            if none does.
        word: Where `JAXDIST_CLUSTER` may name it, for the error about another word; "" for nowhere.
        has_port: Whether `make` takes `port`.
        has_task: Whether `make` takes `task_type` and `task_id`; else the resolver has setters.
        options: The other arguments of `make`, as options of `jaxdist resolve`.
        when_shown: Arguments of `make` for `jaxdist resolve`, which changes nothing.
    """

    make: Callable[..., ClusterResolver]
    find: Callable[[Mapping[str, str]], str] = lambda _: ""
    word: str = ""
    has_port: bool = False
    has_task: bool = False
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    when_shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)


ENVIRONMENTS = {
    "tf_config": Environment(lambda environ: TFConfigClusterResolver(environ=environ)),
    "slurm": Environment(
        _make_slurm, _find_step, "under srun", has_port=True, when_shown={"gpus_per_node": 0}
    ),
    "kubernetes": Environment(
        _make_kubernetes,
        word="in a JobSet",
        has_port=True,
        options={
            "service": {"help": "headless service of an indexed Job"},
            "processes": {"type": int, "metavar": "N", "help": "pods of an indexed Job or JobSet"},
            "processes_in_job": {"type": int, "metavar": "N", "help": "pods of each Job"},
            "label": {"action": "append", "default": [], "help": "list pods with this label"},
            "off_cluster": {"action": "store_true", "help": "list pods from elsewhere"},
        },
    ),
    "gce": Environment(
        _make_gce,
        has_port=True,
        has_task=True,
        options={"project": {}, "zone": {}, "instance_group": {}},
    ),
    "tpu": Environment(lambda _: TPUClusterResolver(""), _find_hosts),
}
