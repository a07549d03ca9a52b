"""Cluster resolvers: documented names under `tf.distribute.cluster_resolver`."""

from jaxdist._not_there import explain_missing as _explain_missing
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec as ClusterSpec
from jaxdist.cluster_resolver._connect import (
    experimental_connect_to_cluster as experimental_connect_to_cluster,
)
from jaxdist.cluster_resolver._resolver import ClusterResolver as ClusterResolver
from jaxdist.cluster_resolver._simple import SimpleClusterResolver as SimpleClusterResolver
from jaxdist.cluster_resolver._tpu import TPUClusterResolver as TPUClusterResolver

_explain_missing(__name__)
