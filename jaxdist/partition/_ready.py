"""Rules that are ready to use."""

from jaxdist._validate import Renamed
from jaxdist.partition._placements import Placement, Replicate, Shard, Split
from jaxdist.partition._rules import Rules

_ATTENTION_IN = "*att*/{query,key,value,q_proj,k_proj,v_proj}"
_ATTENTION_OUT = "*att*/{out,o_proj}"
_MLP_IN = "{up,gate,wi,wi_0,wi_1,fc1,up_proj,gate_proj}"
_MLP_OUT = "{down,wo,fc2,down_proj}"
_VOCABULARY = "{unembed,lm_head}"


def replicated() -> Rules:
    """Rules of data parallelism: every device holds every parameter.

    Example:
        >>> partition.replicated().placement_of("layers/0/mlp/up/kernel")
        Replicate()
    """
    return Rules([], otherwise=Replicate())


def fsdp(*, min_bytes: float | None = None, axes: tuple[str, ...] | None = None) -> Rules:
    """Rules of fully sharded data parallelism (ZeRO-3).

    Each parameter lies in pieces over the replicas, cut along the largest dim that they divide;
    gradients and the optimizer's state too. Small ones stay whole.

    Args:
        min_bytes: Leaves with fewer bytes (in float32) stay whole; None takes the size from
            which cutting pays.
        axes: Of several replica axes those that are cut over; None is all of them.

    Example:
        >>> partition.fsdp(min_bytes=0).placement_of("embed/embedding")
        Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0)

    Source:
        ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
    """
    with Renamed("partition.Shard", "partition.fsdp"):
        return Rules([("*", Shard(axes=axes, min_bytes=min_bytes))])


def tensor_parallel() -> Rules:
    """Rules of tensor parallelism for attention and MLP blocks.

    The kernels into a block (`query`, `key`, `value`; `up`, `gate`) are split by their outputs,
    the kernels out of it (`out`; `down`) by their inputs, so that one all-reduce at the end of
    each block is all that a forward pass needs. The projection to the vocabulary is split by its
    outputs, the rest is replicated. Heads must be divided by the logical devices. Kernels of
    layers that are stacked in one array (`nnx.scan`) have one dim more in front, and need rules
    of their own.

    Example:
        >>> rules = partition.tensor_parallel()
        >>> rules.placement_of("layers/0/attention/query/kernel")
        Split(dim=1)
        >>> rules.placement_of("layers/0/mlp/down/kernel")
        Split(dim=0)

    Source:
        Megatron-LM, arXiv:1909.08053.
    """
    return Rules(_rules_of_blocks(Split(1), Split(0)), otherwise=Replicate(), must_match=False)


def fsdp_tensor_parallel(
    *, min_bytes: float | None = None, axes: tuple[str, ...] | None = None
) -> Rules:
    """Rules of `tensor_parallel` and `fsdp` together.

    What is split over the logical devices is also cut over the replicas, along its other dim.

    Args:
        min_bytes: As for `fsdp`.
        axes: As for `fsdp`.

    Example:
        >>> rules = partition.fsdp_tensor_parallel(min_bytes=0)
        >>> rules.placement_of("layers/0/mlp/up/kernel")
        Shard(dim=None, split=1, axes=None, pad=False, min_bytes=0)
    """

    def shard(split: int | None) -> Placement:
        with Renamed("partition.Shard", "partition.fsdp_tensor_parallel"):
            return Shard(None, split, axes, min_bytes=min_bytes)

    return Rules(_rules_of_blocks(shard(1), shard(0)), otherwise=shard(None), must_match=False)


def _rules_of_blocks(by_outputs: Placement, by_inputs: Placement) -> list[tuple[str, Placement]]:
    """Kernels, and the biases of what is split by its outputs."""
    into = [_ATTENTION_IN, _MLP_IN, _VOCABULARY]
    return [
        *((f"{name}/kernel", by_outputs) for name in into),
        *((f"{name}/bias", by_inputs) for name in into),
        *((f"{name}/kernel", by_inputs) for name in (_ATTENTION_OUT, _MLP_OUT)),
    ]
