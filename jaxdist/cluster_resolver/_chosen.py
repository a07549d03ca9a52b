"""The resolver that `JAXDIST_CLUSTER` names."""

import os
from collections.abc import Mapping

from jaxdist.cluster_resolver._kubernetes import KubernetesClusterResolver
from jaxdist.cluster_resolver._resolver import ClusterResolver
from jaxdist.cluster_resolver._slurm import SlurmClusterResolver
from jaxdist.cluster_resolver._tf_config import TFConfigClusterResolver
from jaxdist.errors import ClusterError

CLUSTER = "JAXDIST_CLUSTER"
# Below the ports that Linux gives to programs that ask for any. Blocks, so that two steps on one
# host seldom meet.
_FIRST_PORT, _BLOCKS, _BLOCK = 10240, 320, 64


def choose_resolver() -> ClusterResolver:
    """Return the resolver of this process: of `TF_CONFIG`, else the one `JAXDIST_CLUSTER` names.

    Raises:
        ClusterError: `JAXDIST_CLUSTER` is another word, or what the resolver reads is not valid.
    """
    chosen = os.environ.get(CLUSTER, "").strip()
    if "TF_CONFIG" in os.environ or not chosen:
        return TFConfigClusterResolver()
    if chosen == "slurm":
        return SlurmClusterResolver(port_base=choose_slurm_port(os.environ))
    if chosen == "kubernetes":
        return KubernetesClusterResolver()
    raise ClusterError(
        f"The environment variable {CLUSTER} is {chosen!r}.\n\n"
        "It says where the processes of the job are described: slurm or kubernetes.\n\n"
        f"Set {CLUSTER}=slurm under srun, {CLUSTER}=kubernetes in a JobSet, or unset it to use "
        "TF_CONFIG."
    )


def choose_slurm_port(environ: Mapping[str, str]) -> int:
    """Return the first port of a host, from the numbers of the job and of its step.

    Jobs that share a host get different ports, and so does each `srun` of a job.
    """
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    return _FIRST_PORT + (job * 7 + step) % _BLOCKS * _BLOCK
