"""XLA's collectives, in packs."""

from collections.abc import Sequence
from typing import Any

from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.default_sum import default_summing
from jaxdist._mesh import ReplicaMesh


class CollectiveAllReduce(AlgorithmicOps):
    """What strategies use by default, in one process and between several: XLA's collectives.

    `bytes_per_pack` of the options cuts an all-reduce into packs. 0 leaves large leaves alone, and
    puts small ones of one dtype together where starting a collective costs more than copying
    them (on CPU; on TPU and GPU, XLA does that without copies).

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
        """Packs as the options say, or by the cost model."""
        return default_summing(leaves, layout, options)
