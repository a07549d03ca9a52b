"""Documented names under `tf.contrib.distribute`."""

from jaxdist.collectives import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
from jaxdist.collectives import MultiWorkerAllReduce as MultiWorkerAllReduce
