"""The all-reduce within groups of devices first, then across the groups."""

from collections.abc import Sequence
from typing import Any, final

from jaxdist._called import called
from jaxdist._collectives.algorithms import (
    Algorithm,
    TwoLevel,
    Xla,
    find_worker_size,
    group_all,
)
from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.cross_device.checks import check_count
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.packing import Alone, EqualPacks
from jaxdist._collectives.sums.sum_by_size import Entry, SumBySize
from jaxdist._mesh import ReplicaMesh


@final
class HierarchicalCopyAllReduce(AlgorithmicOps):
    """All-reduce within groups of nearby devices, then across the groups, then within them again.

    The groups are the processes of the job. In one process, they are two halves of the replicas, as
    on a machine with two islands of four GPUs. If no such groups exist (an odd number of replicas,
    two replicas, or one in each process), it is XLA's all-reduce.

    Args:
        num_packs: All leaves of one dtype are concatenated and divided into this many vectors. With
            0, every leaf is reduced alone.

    Raises:
        ArgumentError: `num_packs` is below 0.

    Cost:
        For each vector a reduce-scatter within groups, an all-reduce of `1/local` of it across
        groups, and an all-gather within groups. Two copies of the leaves, if they are packed.

    Example:
        >>> strategy = MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(num_packs=0))
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", x)
        >>> x = PerReplica(np.ones((8, 4), "float32"))
        >>> [c.kind for c in strategy.lower(step, (x,)).compile().collectives]
        ['reduce-scatter', 'all-reduce', 'all-gather']

    Source:
        `tf.distribute.HierarchicalCopyAllReduce`.
    """

    @called("HierarchicalCopyAllReduce")
    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = check_count("num_packs", num_packs, least=0)

    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return a sum of each pack in two levels."""
        count = layout.num_replicas
        algorithm: Algorithm = Xla()
        reason = f"{self!r}: no groups of several replicas each"
        local = find_group_size(layout)
        if local:
            algorithm = TwoLevel(Xla(), Xla(), local)
            reason = f"{self!r}: {count // local} groups of {local} replicas"
        packing = EqualPacks(self.num_packs) if self.num_packs else Alone()
        how = SumBySize(group_all(layout), (Entry(algorithm),), packing, self.num_packs > 0)
        return AllReducePlan(algorithm.name, reason), how

    def __repr__(self) -> str:
        return f"HierarchicalCopyAllReduce(num_packs={self.num_packs})"


def find_group_size(layout: ReplicaMesh) -> int:
    """Return how many nearby replicas a group has; 0 if there are no groups of several."""
    count = layout.num_replicas
    # In one process JAX does not tell which devices are near, so two halves are a guess.
    local = find_worker_size(layout.replica_owners) or (count // 2 if count % 2 == 0 else 1)
    return local if 1 < local < count else 0
