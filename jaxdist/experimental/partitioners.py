"""Documented names under `tf.distribute.experimental.partitioners`."""

from jaxdist._parameter_server import FixedShardsPartitioner as FixedShardsPartitioner
from jaxdist._parameter_server import MaxSizePartitioner as MaxSizePartitioner
from jaxdist._parameter_server import MinSizePartitioner as MinSizePartitioner
from jaxdist._parameter_server import Partitioner as Partitioner
