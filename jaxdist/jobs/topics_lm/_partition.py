"""How the parameters of the language model lie on the devices."""

import dataclasses
from typing import Literal, get_args

from jaxdist import partition
from jaxdist.errors import ArgumentError
from jaxdist.jobs._config.schema import OptimizerConfig
from jaxdist.partition import Rules

Partition = Literal[
    "replicated",
    "tensor_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "fsdp_in_slice",
    "fsdp_in_slice_tensor_parallel",
]
NAMES: tuple[str, ...] = get_args(Partition)
# The replica axis within a slice, where replicas have one for slices too.
_WITHIN = ("replica",)


def rules_of(name: str, whole_below: int = 0) -> Rules:
    """The rules of a name.

    Args:
        name: One of `NAMES`.
        whole_below: Under FSDP, the bytes of a parameter below which it stays whole.

    Raises:
        ArgumentError: Another name.

    Example:
        >>> rules_of("tensor_parallel").placement_of("layers/0/mlp/up/kernel")
        Split(dim=1)
    """
    if name == "replicated":
        return partition.replicated()
    if name == "tensor_parallel":
        return partition.tensor_parallel()
    if name == "fsdp":
        return partition.fsdp(min_bytes=whole_below)
    if name == "fsdp_tensor_parallel":
        return partition.fsdp_tensor_parallel(min_bytes=whole_below)
    if name == "fsdp_in_slice":
        return partition.fsdp(min_bytes=whole_below, axes=_WITHIN)
    if name == "fsdp_in_slice_tensor_parallel":
        return partition.fsdp_tensor_parallel(min_bytes=whole_below, axes=_WITHIN)
    raise ArgumentError(
        f"The language model has no rules {name!r}.\n\n"
        f"Its rules are {', '.join(map(repr, NAMES))}.\n\nPass one of these."
    )


def optimizer_for(name: str, config: OptimizerConfig) -> OptimizerConfig:
    """The optimizer for parameters that lie as `name` says.

    Clipping by the norm of all gradients needs more than the pieces that a replica has, and
    `sharded_update` sees to that.
    """
    if "fsdp" in name and config.update == "replicated":
        return dataclasses.replace(config, update="sharded")
    return config
