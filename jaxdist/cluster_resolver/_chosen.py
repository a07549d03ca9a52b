"""Chooses the cluster of this process: the only place that decides where to read its tasks."""

import dataclasses
import os
from collections.abc import Mapping, MutableMapping

from jaxdist.cluster_resolver._kubernetes import KubernetesClusterResolver
from jaxdist.cluster_resolver._resolver import ClusterResolver
from jaxdist.cluster_resolver._slurm import SlurmClusterResolver
from jaxdist.cluster_resolver._tf_config import TFConfigClusterResolver
from jaxdist.cluster_resolver._tpu import TPUClusterResolver
from jaxdist.errors import ClusterError

# Note [Which cluster a process is in]
# Strategies, tasks of `jaxdist train`, Estimator, servers and `jaxdist resolve` call `find_source`,
# so that all give the same answer. A resolver that the program passes comes first. Then come
# `TF_CONFIG`, `JAXDIST_CLUSTER`, a step of Slurm with several tasks, and a TPU pod of several
# hosts. A batch script of Slurm is one process: it has `SLURM_NTASKS`, but no step. Variables of
# other launchers are only a sign: they do not say where the other processes are, and independent
# programs also run under them.

CLUSTER = "JAXDIST_CLUSTER"
_WORDS = ("slurm", "kubernetes", "none")
# Below the ports that Linux assigns to programs that ask for any port. Each step has a block of
# ports, so that two steps on one host seldom use the same ones.
_FIRST_PORT, _BLOCKS, _BLOCK = 10240, 320, 64
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
        if chosen not in _WORDS:
            raise ClusterError(
                f"The environment variable {CLUSTER} is {chosen!r}.\n\n"
                "It says where the processes of the job are described, slurm or kubernetes, or "
                "that this process is alone, none.\n\n"
                f"Set {CLUSTER}=slurm under srun, {CLUSTER}=kubernetes in a JobSet, or unset it to "
                "use TF_CONFIG."
            )
        return Source(chosen, f"{CLUSTER}={chosen}")
    if "SLURM_STEP_ID" in environ and _read_count(environ, "SLURM_STEP_NUM_TASKS") > 1:
        return Source("slurm", f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']}")
    for variable in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if len([host for host in environ.get(variable, "").split(",") if host.strip()]) > 1:
            return Source("tpu", variable)
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
    if source == "slurm":
        return SlurmClusterResolver(port_base=choose_slurm_port(own), environ=own)
    if source == "kubernetes":
        return KubernetesClusterResolver(environ=own)
    if source == "tpu":
        return TPUClusterResolver("")
    return TFConfigClusterResolver(environ=own)


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
