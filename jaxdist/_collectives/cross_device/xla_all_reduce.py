"""`CrossDeviceOps` that use XLA's all-reduce, for packs of leaves."""

from collections.abc import Sequence
from typing import Any, final

from jaxdist._called import called
from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.cross_device.checks import check_count
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.default_sum import plan_default_sum
from jaxdist._collectives.sums.packs import LeafPacks
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
        return plan_default_sum(leaves, layout, options)


@final
class NcclAllReduce(AlgorithmicOps):
    """XLA's own all-reduce: NCCL on GPUs, the interconnect on TPUs, threads or gloo on CPUs.

    Args:
        num_packs: The leaves of a batch are divided into this many all-reduces of about the same
            bytes, in their order. Leaves are not divided and not copied. With 0, XLA chooses.

    Raises:
        ArgumentError: `num_packs` is below 0.

    Cost:
        `num_packs` all-reduces, which together send all bytes.

    Example:
        >>> strategy = MirroredStrategy(cross_device_ops=NcclAllReduce(num_packs=2))
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", [x, x + 1, x + 2, x + 3])
        >>> [int(v) for v in strategy.run(step, (PerReplica(range(8)),))]
        [28, 36, 44, 52]

    Source:
        `tf.distribute.NcclAllReduce`.
    """

    @called("NcclAllReduce")
    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = check_count("num_packs", num_packs, least=0)

    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return all-reduces of several leaves each."""
        packs = LeafPacks(layout.replica_axes, num_packs=self.num_packs)
        asked = packs.largest_bytes(leaves) if self.num_packs else 0
        return AllReducePlan("xla", repr(self), pack_bytes=asked), packs

    def __repr__(self) -> str:
        return f"NcclAllReduce(num_packs={self.num_packs})"
