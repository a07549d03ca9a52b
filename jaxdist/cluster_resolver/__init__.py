"""Cluster resolvers: documented names under `tf.distribute.cluster_resolver`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late
from jaxdist._not_there import explain_missing as _explain_missing

if TYPE_CHECKING:
    from jaxdist.cluster_resolver._chosen import ENVIRONMENTS as ENVIRONMENTS
    from jaxdist.cluster_resolver._chosen import choose_resolver as choose_resolver
    from jaxdist.cluster_resolver._chosen import choose_slurm_port as choose_slurm_port
    from jaxdist.cluster_resolver._chosen import describe_unused_sign as describe_unused_sign
    from jaxdist.cluster_resolver._chosen import find_source as find_source
    from jaxdist.cluster_resolver._cluster_spec import ClusterSpec as ClusterSpec
    from jaxdist.cluster_resolver._connect import (
        experimental_connect_to_cluster as experimental_connect_to_cluster,
    )
    from jaxdist.cluster_resolver._gce import GCEClusterResolver as GCEClusterResolver
    from jaxdist.cluster_resolver._kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from jaxdist.cluster_resolver._kubernetes import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from jaxdist.cluster_resolver._resolver import ClusterResolver as ClusterResolver
    from jaxdist.cluster_resolver._resolver import find_own_task as find_own_task
    from jaxdist.cluster_resolver._resolver import list_training_tasks as list_training_tasks
    from jaxdist.cluster_resolver._simple import SimpleClusterResolver as SimpleClusterResolver
    from jaxdist.cluster_resolver._slurm import SlurmClusterResolver as SlurmClusterResolver
    from jaxdist.cluster_resolver._tf_config import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from jaxdist.cluster_resolver._tpu import TPUClusterResolver as TPUClusterResolver
    from jaxdist.cluster_resolver._union import UnionResolver as UnionResolver

    # isort: split
    # The second name of one class comes second: tables and errors take the first one.
    from jaxdist.cluster_resolver._union import UnionClusterResolver as UnionClusterResolver

_open_late(__name__)
_explain_missing(__name__)
