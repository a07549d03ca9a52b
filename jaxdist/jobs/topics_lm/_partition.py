"""How the parameters of the language model are placed on the devices."""

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
# The replica axis within a slice; the other replica axis is over slices.
_WITHIN = ("replica",)


def get_rules(name: str, whole_below: int = 0) -> Rules:
    """Return the rules of a name.

    Args:
        name: One of `NAMES`.
        whole_below: For FSDP: parameters with fewer bytes stay replicated.

    Raises:
        ArgumentError: The name is not in `NAMES`.

    Example:
        >>> get_rules("tensor_parallel").placement_of("layers/0/mlp/up/kernel")
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


def adapt_optimizer(name: str, config: OptimizerConfig) -> OptimizerConfig:
    """Return the configuration of the optimizer for the rules `name`."""
    # With FSDP a replica has only pieces of the gradients, and clipping needs the norm of all of
    # them. `sharded_update` computes that norm over the replicas.
    if "fsdp" in name and config.update == "replicated":
        return dataclasses.replace(config, update="sharded")
    return config
