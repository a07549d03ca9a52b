"""`experts`, a mixture of experts whose drops and gradients are the same on every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._validate import check_callable
from jaxdist.nn._axis import find_axis
from jaxdist.nn._experts_arguments import (
    as_capacity,
    as_group,
    as_router,
    as_tokens,
    as_top_k,
    as_weights,
    check_experts,
    check_result,
)
from jaxdist.nn._experts_exchange import compute_groups, replicate


@called("nn.experts")
def experts(
    expert: Callable[[Any, jax.Array], jax.Array],
    router: Any,
    weights: Any,
    x: Any,
    *,
    top_k: int,
    capacity: float | None = 1.25,
    group: int | None = None,
    axis: str = "experts",
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """TODO."""
    check_callable(expert, "expert", "Pass a function of the weights of one expert and its rows.")
    tokens = as_tokens(x)
    matrix = as_router(router, tokens)
    count = matrix.shape[1]
    top_k = as_top_k(top_k, count)
    size = as_group(group, tokens)
    slots = as_capacity(capacity, top_k=top_k, tokens=size, experts=count)
    held = as_weights(weights, count)
    found = find_axis(axis, "experts")
    check_experts(count, found)
    if not tokens.size:
        return tokens, (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    dtype = jnp.promote_types(jnp.promote_types(tokens.dtype, matrix.dtype), jnp.float32)
    spec = _compat.find_spec_of_type(tokens)
    groups = replicate(tokens).reshape(-1, size, tokens.shape[-1])
    y, balance, dropped = compute_groups(
        check_result(expert),
        matrix.astype(dtype),
        held,
        groups,
        top_k=top_k,
        capacity=slots,
        axis=found,
    )
    y = y.reshape(tokens.shape)
    y = y if spec is None else jax.sharding.reshard(y, spec)
    return y, (balance.mean(), dropped.mean())
