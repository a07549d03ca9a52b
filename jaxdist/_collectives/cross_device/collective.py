"""The default `CrossDeviceOps`: XLA's collectives, in packs."""

from collections.abc import Sequence
from typing import Any

from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.default_sum import default_summing
from jaxdist._mesh import ReplicaMesh


class CollectiveAllReduce(AlgorithmicOps):
    """XLA's collectives; the default of strategies, in one process and between several.

    `bytes_per_pack` of the options divides an all-reduce into packs. With 0, large leaves are
    reduced alone. Small leaves of one dtype are concatenated on CPU where starting a collective
    takes longer than copying them. On TPU and GPU, XLA combines them without copies.

    Example:
        >>> ops = jaxdist.experimental.CollectiveAllReduce()
        >>> ops.reduce("MEAN", PerReplica([1.0, 2.0]), "cpu:0")
        Array(1.5, dtype=float32)

    Source:
        The collective ops of `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    takes_bytes_per_pack = True

    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return the packs of the options, or those of the cost model."""
        return default_summing(leaves, layout, options)
