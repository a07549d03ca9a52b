"""Documented names under `tf.distribute.experimental.coordinator`."""

from jaxdist._parameter_server import ClusterCoordinator as ClusterCoordinator
from jaxdist._parameter_server import PerWorkerValues as PerWorkerValues
from jaxdist._parameter_server import RemoteValue as RemoteValue
