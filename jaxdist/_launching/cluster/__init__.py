"""Runs jobs with tasks of several kinds: a chief, parameter servers and workers."""

from jaxdist._launching.cluster.environment import FINISHED as FINISHED
from jaxdist._launching.cluster.environment import LAUNCH_ID as LAUNCH_ID
from jaxdist._launching.cluster.job import ClusterJob as ClusterJob
from jaxdist._launching.cluster.job import launch_cluster as launch_cluster
