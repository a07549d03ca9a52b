"""Predefined rules."""

import dataclasses

from jaxdist._called import called
from jaxdist.partition._patterns import TABLE
from jaxdist.partition._placements import Placement, Replicate, Shard, Split
from jaxdist.partition._rules import Rules

# Several names for each kind of layer, since libraries of models name them differently.
_ATTENTION_IN = "*att*/{query,key,value,q_proj,k_proj,v_proj}"
_ATTENTION_OUT = "*att*/{out,o_proj}"
_MLP_IN = "{up,gate,wi,wi_0,wi_1,fc1,up_proj,gate_proj}"
_MLP_OUT = "{down,wo,fc2,down_proj}"
_VOCABULARY = "{unembed,lm_head}"


def replicated() -> Rules:
    """Return the rules of data parallelism: every device holds every parameter.

    Example:
        >>> partition.replicated().placement_of("layers/0/mlp/up/kernel")
        Replicate()
    """
    return Rules([], otherwise=Replicate())


@called("partition.fsdp", replaces="partition.Shard")
def fsdp(*, min_bytes: float | None = None, axes: tuple[str, ...] | None = None) -> Rules:
    """Return the rules of fully sharded data parallelism (ZeRO-3).

    Each parameter is sharded over the replicas along the dim that `Shard()` takes. Gradients and
    the optimizer state are sharded in the same way. Small parameters are replicated.

    Args:
        min_bytes: Leaves with fewer bytes (in float32) are replicated; None takes the size from
            which sharding is faster.
        axes: The replica axes to shard over, if the strategy has several; None means all of them.

    Example:
        >>> partition.fsdp(min_bytes=0).placement_of("embed/embedding")
        Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0)

    Source:
        ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
    """
    return Rules([("*", Shard(axes=axes, min_bytes=min_bytes))])


def tensor_parallel() -> Rules:
    """Return the rules of tensor parallelism for attention and MLP blocks.

    The kernels into a block (`query`, `key`, `value`; `up`, `gate`) are split by their outputs,
    and the kernels out of it (`out`; `down`) by their inputs. So a forward pass needs only one
    all-reduce at the end of each block. The projection to the vocabulary is split by its outputs.
    An embedding table is split by its rows if the logical devices divide them; a lookup then costs
    one more all-reduce. The rest is replicated. The number of heads must be a multiple of the
    number of logical devices. Kernels of layers that are stacked in one array (`nnx.scan`) have one
    more dim in front. If their variables have the metadata `stacked_layers=True`, they are placed
    like a kernel of one layer; otherwise they need their own rules.

    Example:
        >>> rules = partition.tensor_parallel()
        >>> rules.placement_of("layers/0/attention/query/kernel")
        Split(dim=1)
        >>> rules.placement_of("layers/0/mlp/down/kernel")
        Split(dim=0)
        >>> rules.placement_of("embed/embedding")
        Split(dim=0, must_divide=False)

    Source:
        Megatron-LM, arXiv:1909.08053.
    """
    # Not every model has all of these layers, so a rule may match nothing.
    rules = [*_rules_of_blocks(Split(1), Split(0)), (TABLE, Split(0, must_divide=False))]
    return Rules(rules, otherwise=Replicate(), must_match=False)


@called("partition.fsdp_tensor_parallel", replaces="partition.Shard")
def fsdp_tensor_parallel(
    *, min_bytes: float | None = None, axes: tuple[str, ...] | None = None
) -> Rules:
    """Return the rules of `tensor_parallel` and `fsdp` together.

    A kernel that is split over the logical devices is also sharded over the replicas, along its
    other dim; an embedding table is split by its rows and sharded along its columns.

    Args:
        min_bytes: As for `fsdp`.
        axes: As for `fsdp`.

    Example:
        >>> rules = partition.fsdp_tensor_parallel(min_bytes=0)
        >>> rules.placement_of("layers/0/mlp/up/kernel")
        Shard(dim=None, split=1, axes=None, pad=False, min_bytes=0)
    """

    def shard(split: int | None) -> Shard:
        return Shard(None, split, axes, min_bytes=min_bytes)

    table = dataclasses.replace(shard(0), must_divide=False)
    rules = [*_rules_of_blocks(shard(1), shard(0)), (TABLE, table)]
    return Rules(rules, otherwise=shard(None), must_match=False)


def _rules_of_blocks(by_outputs: Placement, by_inputs: Placement) -> list[tuple[str, Placement]]:
    """Return the rules for kernels, and for the biases of kernels that are split by outputs."""
    # The bias of a kernel that is split by its inputs is added to the sum over the logical
    # devices, so it is not split: `otherwise` places it.
    into = [_ATTENTION_IN, _MLP_IN, _VOCABULARY]
    return [
        *((f"{name}/kernel", by_outputs) for name in into),
        *((f"{name}/bias", by_inputs) for name in into),
        *((f"{name}/kernel", by_inputs) for name in (_ATTENTION_OUT, _MLP_OUT)),
    ]
