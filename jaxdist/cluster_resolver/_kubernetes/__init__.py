"""`KubernetesClusterResolver`: resolves pods that the cluster lists, or those of an indexed Job."""

from jaxdist.cluster_resolver._kubernetes.resolver import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from jaxdist.cluster_resolver._kubernetes.resolver import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
