"""The table of partitions: ways to place the state of a model on the devices, by name."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from jaxdist import partition

# Note [A new partition]
# A row of this table is all that `jaxdist train` and `jaxdist plan` need. The entry
# `strategy.partition` accepts the names of the table, plans and sweeps try them, and the help of
# the command lists them. Checks and advice read the attributes of `Partition`, never a name.


@dataclasses.dataclass(frozen=True)
class Partition:
    """A way to place the parameters of a model and the state of its optimizer.

    Attributes:
        make_rules: Makes the rules. Its argument is `strategy.whole_below`.
        is_split: Whether parameters are split over the logical devices of a replica.
        is_sharded: Whether state is sharded over replicas.
        is_in_slice: Whether state is sharded within each slice only. The strategy then has the
            replica axes `("slice", "replica")`.
    """

    make_rules: "Callable[[int], partition.Rules]"
    is_split: bool = False
    is_sharded: bool = False
    is_in_slice: bool = False


# The replica axis within a slice. The other replica axis spans slices.
WITHIN = ("replica",)

PARTITIONS: Mapping[str, Partition] = MappingProxyType(
    {
        "replicated": Partition(lambda _: partition.replicated()),
        "tensor_parallel": Partition(lambda _: partition.tensor_parallel(), is_split=True),
        "fsdp": Partition(lambda least: partition.fsdp(min_bytes=least), is_sharded=True),
        "fsdp_tensor_parallel": Partition(
            lambda least: partition.fsdp_tensor_parallel(min_bytes=least),
            is_split=True,
            is_sharded=True,
        ),
        "fsdp_in_slice": Partition(
            lambda least: partition.fsdp(min_bytes=least, axes=WITHIN),
            is_sharded=True,
            is_in_slice=True,
        ),
        "fsdp_in_slice_tensor_parallel": Partition(
            lambda least: partition.fsdp_tensor_parallel(min_bytes=least, axes=WITHIN),
            is_split=True,
            is_sharded=True,
            is_in_slice=True,
        ),
    }
)
# The kinds of update in plans, with `optimizer.update` of each. They replicate the parameters.
UPDATES: Mapping[str, Literal["replicated", "sharded", "compressed"]] = MappingProxyType(
    {"sharded_update": "sharded", "compressed": "compressed"}
)

# A type checker cannot read the table. Configurations are converted to this type at run time.
if TYPE_CHECKING:
    PartitionName = str
else:
    PartitionName = Literal[tuple(PARTITIONS)]


def find_partition(rules: str) -> Partition:
    """Return the partition of the rules of a plan. Kinds of update replicate the parameters.

    Example:
        >>> find_partition("fsdp").is_sharded, find_partition("sharded_update").is_sharded
        (True, False)
    """
    return PARTITIONS.get(rules, PARTITIONS["replicated"])


def list_like(name: str, **changed: bool) -> list[str]:
    """Return the names of partitions with the attributes of `name`, except for `changed`.

    Example:
        >>> list_like("fsdp_tensor_parallel", is_split=False)
        ['fsdp']
    """
    wanted = {**_get_flags(PARTITIONS[name]), **changed}
    return [other for other, found in PARTITIONS.items() if _get_flags(found) == wanted]


def _get_flags(found: Partition) -> dict[str, bool]:
    return {key: value for key, value in vars(found).items() if key != "make_rules"}
