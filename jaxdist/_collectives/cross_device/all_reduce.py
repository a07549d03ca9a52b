"""`CrossDeviceOps` that reduce by one algorithm: XLA, two levels, or one by its name."""

from collections.abc import Sequence
from typing import Any, final

from jaxdist._called import called, refuse
from jaxdist._collectives.algorithms.algorithm import Algorithm, TwoLevel, group_all
from jaxdist._collectives.algorithms.by_name import find_worker_size
from jaxdist._collectives.algorithms.one_level import Xla
from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps, check_count
from jaxdist._collectives.marks import AllReducePlan, Summing
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.sums.default_sum import LeafPacks, plan_default_sum
from jaxdist._collectives.sums.packing import (
    Alone,
    Entry,
    EqualPacks,
    Packing,
    SmallInRuns,
    SumBySize,
)
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import show


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
        largest = packs.largest_bytes(leaves) if self.num_packs else 0
        return AllReducePlan("xla", repr(self), pack_bytes=largest), packs

    def __repr__(self) -> str:
        return f"NcclAllReduce(num_packs={self.num_packs})"


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
        algorithm = choose_hierarchical(layout)
        reason = f"{self!r}: no groups of several replicas each"
        if isinstance(algorithm, TwoLevel):
            local = algorithm.local
            reason = f"{self!r}: {layout.num_replicas // local} groups of {local} replicas"
        packing = EqualPacks(self.num_packs) if self.num_packs else Alone()
        how = SumBySize(group_all(layout), (Entry(algorithm),), packing, self.num_packs > 0)
        return AllReducePlan(algorithm.name, reason), how

    def __repr__(self) -> str:
        return f"HierarchicalCopyAllReduce(num_packs={self.num_packs})"


def choose_hierarchical(layout: ReplicaMesh) -> Algorithm:
    """Return two levels over groups of nearby replicas; XLA's own if no group has several."""
    count = layout.num_replicas
    # In one process JAX does not tell which devices are near, so two halves are a guess.
    local = find_worker_size(layout.replica_owners) or (count // 2 if count % 2 == 0 else 1)
    return TwoLevel(Xla(), Xla(), local) if 1 < local < count else Xla()


_ALGORITHMS = ("nccl", "hierarchical_copy")


class AllReduceCrossDeviceOps(AlgorithmicOps):
    """All-reduce ops with a named algorithm and packs of leaves.

    Args:
        all_reduce_alg: `'nccl'` (XLA's own) or `'hierarchical_copy'` (as
            `HierarchicalCopyAllReduce`).
        num_packs: All leaves of one dtype are concatenated and divided into this many vectors.
            With 0, every leaf is reduced alone.
        agg_small_grads_max_bytes: With `num_packs=0`: neighbouring leaves of up to this many bytes
            share a vector. With 0, every leaf is reduced alone.
        agg_small_grads_max_group: The most leaves in such a vector.

    Raises:
        ArgumentError: The algorithm is unknown, or a number is below 0 (below 1 for the group).

    Example:
        >>> ops = jaxdist.contrib.AllReduceCrossDeviceOps("nccl", num_packs=2)
        >>> ops.reduce("MEAN", PerReplica([1.0, 2.0]), "cpu:0")
        Array(1.5, dtype=float32)

    Source:
        `tf.contrib.distribute.AllReduceCrossDeviceOps`.
    """

    @called(lambda self: type(self).__name__)
    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in _ALGORITHMS:
            raise refuse(
                f"all_reduce_alg={show(all_reduce_alg)}.",
                "all_reduce_alg is 'nccl' or 'hierarchical_copy'.",
                "Pass all_reduce_alg='nccl', or leave it out.",
            )
        self.all_reduce_alg = all_reduce_alg
        self._set_packing(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    @called(lambda self: type(self).__name__)
    def _set_packing(self, num_packs: Any, max_bytes: Any, max_group: Any) -> None:
        """Check and set the attributes that control packing."""
        self.num_packs = check_count("num_packs", num_packs, least=0)
        self.agg_small_grads_max_bytes = check_count(
            "agg_small_grads_max_bytes", max_bytes, least=0
        )
        self.agg_small_grads_max_group = check_count(
            "agg_small_grads_max_group", max_group, least=1
        )

    @property
    def is_packed(self) -> bool:
        """Whether several leaves can share a vector.

        Example:
            >>> jaxdist.contrib.AllReduceCrossDeviceOps(num_packs=0).is_packed
            False
        """
        return bool(self.num_packs or self.agg_small_grads_max_bytes)

    @property
    def packing(self) -> Packing:
        """The rule that puts leaves into vectors.

        Example:
            >>> jaxdist.contrib.AllReduceCrossDeviceOps(num_packs=3).packing
            EqualPacks(count=3)
        """
        if self.num_packs:
            return EqualPacks(self.num_packs)
        if self.agg_small_grads_max_bytes:
            return SmallInRuns(self.agg_small_grads_max_bytes, self.agg_small_grads_max_group)
        return Alone()

    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return one algorithm for all leaves."""
        is_flat = self.all_reduce_alg == "nccl"
        algorithm = Xla() if is_flat else choose_hierarchical(layout)
        how = SumBySize(group_all(layout), (Entry(algorithm),), self.packing, self.is_packed)
        return AllReducePlan(algorithm.name, repr(self)), how

    def __repr__(self) -> str:
        return (
            f"AllReduceCrossDeviceOps({self.all_reduce_alg!r}, num_packs={self.num_packs}, "
            f"agg_small_grads_max_bytes={self.agg_small_grads_max_bytes}, "
            f"agg_small_grads_max_group={self.agg_small_grads_max_group})"
        )
