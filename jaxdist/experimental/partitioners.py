"""Documented names under `tf.distribute.experimental.partitioners`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._parameter_server import FixedShardsPartitioner as FixedShardsPartitioner
    from jaxdist._parameter_server import MaxSizePartitioner as MaxSizePartitioner
    from jaxdist._parameter_server import MinSizePartitioner as MinSizePartitioner
    from jaxdist._parameter_server import Partitioner as Partitioner

_open_late(__name__)
