"""The older all-reduce ops, with the name of an algorithm."""

from collections.abc import Sequence
from typing import Any

from jaxdist._called import call_as, called, refuse
from jaxdist._collectives.algorithms import Algorithm, TwoLevel, Xla, group_all
from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.cross_device.checks import check_count
from jaxdist._collectives.cross_device.hierarchical import find_group_size
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.packing import Alone, EqualPacks, Packing, SmallInRuns
from jaxdist._collectives.sums.sum_by_size import Entry, SumBySize
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import show


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
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in (
            "nccl",
            "hierarchical_copy",
        ):
            raise refuse(
                f"all_reduce_alg={show(all_reduce_alg)}.",
                "all_reduce_alg is 'nccl' or 'hierarchical_copy'.",
                "Pass all_reduce_alg='nccl', or leave it out.",
            )
        self.all_reduce_alg = all_reduce_alg
        self._set_packing(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    def _set_packing(self, num_packs: Any, max_bytes: Any, max_group: Any) -> None:
        """Check and set the attributes that control packing."""
        name = type(self).__name__
        self.num_packs = call_as(name, check_count, "num_packs", num_packs, least=0)
        self.agg_small_grads_max_bytes = call_as(
            name, check_count, "agg_small_grads_max_bytes", max_bytes, least=0
        )
        self.agg_small_grads_max_group = call_as(
            name, check_count, "agg_small_grads_max_group", max_group, least=1
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
        algorithm: Algorithm = Xla()
        if self.all_reduce_alg == "hierarchical_copy" and (local := find_group_size(layout)):
            algorithm = TwoLevel(Xla(), Xla(), local)
        how = SumBySize(group_all(layout), (Entry(algorithm),), self.packing, self.is_packed)
        return AllReducePlan(algorithm.name, repr(self)), how

    def __repr__(self) -> str:
        return (
            f"AllReduceCrossDeviceOps({self.all_reduce_alg!r}, num_packs={self.num_packs}, "
            f"agg_small_grads_max_bytes={self.agg_small_grads_max_bytes}, "
            f"agg_small_grads_max_group={self.agg_small_grads_max_group})"
        )
