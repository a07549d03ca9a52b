"""`experts`, a mixture of experts whose drops and gradients are the same on every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _compat, _replica
from jaxdist._called import called
from jaxdist._collectives import note_work
from jaxdist._validate import check_callable
from jaxdist._values import wide_dtype
from jaxdist.nn._axis import find_axis
from jaxdist.nn._experts_arguments import (
    as_capacity,
    as_group,
    as_logits,
    as_router,
    as_tokens,
    as_top_k,
    as_weights,
    check_experts,
    check_has_weights,
    check_result,
)
from jaxdist.nn._experts_exchange import compute_groups, replicate
from jaxdist.nn._experts_facts import list_facts
from jaxdist.nn._experts_replicas import check_uses_only_its_rows, open_weights


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
    """Return what experts compute for the tokens that chose them, weighted and summed: a layer.

    A router chooses `top_k` experts for each token. Experts are divided over an axis of the mesh:
    each token is sent to the devices of its experts, and the results come back. An expert takes a
    limited number of tokens of each group of tokens; choices beyond it are dropped.

    Shapes:
        `x` `[rows, tokens, d]`, or with other dims before the tokens, `router` `[d, experts]` and
        leaves of `weights` `[experts, ...]` give `y` like `x`, and two scalars. `expert` gets the
        weights of one expert without dim 0, and rows `[slots, d]`; it returns `[slots, d]`. A
        function as `router` gets `x` and returns `[rows, tokens, experts]`.

    Cost:
        An expert computes `ceil(capacity * top_k * group / experts)` slots for each group, whether
        taken or not; with `capacity=None` it is `group` slots.

        On an axis of n devices each device has an n-th of the groups and of the experts. It sends
        `(n-1)/n` of its slots in an all-to-all, and as much back: about `(n-1)/n * tokens/n * top_k
        * capacity * d` numbers for the `tokens` of a replica, in the dtype of `x`. The gradient
        takes two more, and only one if `x` needs none. If n does not divide the number of groups,
        the last devices have fewer, and all send as many slots as the first.

        On an axis of n replicas each replica has its own groups and an n-th of the experts. It
        sends `(n-1)/n` of its slots in as many all-to-alls, and the weights stay where they are. In
        an uneven step and op by op the weights are gathered, and each replica computes all experts
        for its rows.

    Guarantees:
        Choices, drops, results, losses and gradients are those of one device, on every number of
        replicas and of devices. A group never has tokens of two rows, so that no other row decides
        what is dropped. In a group all first choices come before all second ones, and tokens in
        their order. Of two equal probabilities, the expert with the lower number is chosen.

        Routing is computed in float32 at least. Slots that no token takes have a copy of a token,
        so that no row of zeros makes a gradient nan.

        Over an axis of replicas the gradients of `weights` are the mean over all replicas, like
        those of other parameters in pieces: an all-reduce returns them as they are.

    Args:
        expert: A function of the weights of one expert and of its rows, which computes each row by
            itself: which other rows it gets depends on the number of replicas. For the same reason
            apply dropout to `y`, by `nn.example_keys`. It may use other arrays of the step, except
            over an axis of replicas, where it computes rows of all replicas. It is traced several
            times.
        router: A matrix, or a function of `x`, such as an `nnx.Linear` with a bias or one that
            adds noise. The softmax of `x @ router` or `router(x)` are the probabilities of the
            experts. The weights of the chosen ones are normalised to 1, and not again after drops:
            a token whose choices are all dropped has the result 0. So with `top_k=1` all weights
            are 1, and only the balance loss trains the router. The product with a matrix has the
            full precision of its dtype on each device; a function decides that itself.
        weights: A pytree with the weights of all experts, or an NNX module. Placed by
            `partition.Split(0, axis="experts")` they stay where they are. Parameters in pieces
            (FSDP) are gathered. Over an axis of replicas each leaf is in pieces, placed by
            `partition.Shard(0)`, or with several replica axes `partition.Shard(0, axes=(axis,))`,
            and is not gathered.
        x: Tokens, in a floating-point dtype.
        top_k: The number of experts of each token.
        capacity: The number of tokens that an expert takes, as a factor of an equal share. None
            drops no choice.
        group: The number of tokens of a group, a divisor of `tokens`. The default is a row. For `x`
            `[tokens, d]` in a step of several replicas it is required, since only you know which
            tokens are a row.
        axis: The axis of the mesh over which experts are divided, one of the devices of a replica
            or one of replicas. On a mesh without the default axis, outside of steps and op by op,
            one device computes all experts.

    Returns:
        `y, (balance, dropped)`. `balance` is the balance loss: in each group, `experts` times the
        sum over experts of the share of choices times the mean probability; then the mean over the
        groups. It is 1 where all shares are equal. `dropped` is the share of choices that are
        dropped, in float32. Both are means over this replica, and 0 without tokens: all-reduce them
        with `"mean"`, like a mean of losses.

    Raises:
        ShapeError: The shapes do not fit each other, `group` is no divisor, the devices do not
            divide the experts, or `expert` returns an array that is not like its rows.
        ArgumentError: `top_k` or `capacity` is out of range, `axis` does not exist, or it is one of
            replicas and `weights` are cut along another dim or axis.
        ArgumentTypeError: An argument has another type, or `x` or `router` is of integers. Or
            `axis` is one of replicas, and `weights` are not in pieces.
        AxisNameError: `expert` uses a collective over `axis`, or over any replicas if `axis` is one
            of replicas.
        ContextError: The work is divided over this axis already. Or `axis` is one of replicas, and
            `expert` uses other arrays of the step, or the call is under a `vmap` with this name or
            in a function that divides the work of a replica.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "experts"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> def step(router, weights, x):
        ...     y, (balance, dropped) = jaxdist.nn.experts(
        ...         lambda w, rows: jnp.tanh(rows @ w), router, weights, x, top_k=2, capacity=1.0)
        ...     return y, get_replica_context().all_reduce("mean", dropped)
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> router = jax.random.normal(keys[0], (16, 8))
        >>> weights = jax.random.normal(keys[1], (8, 16, 16))
        >>> x = jax.random.normal(keys[2], (4, 32, 16))
        >>> rows = jax.device_put(x, strategy.per_replica_sharding)
        >>> y, dropped = strategy.run(step, (router, weights, rows))
        >>> y.values[0].shape, float(dropped)
        ((2, 32, 16), 0.15234375)
        >>> float(OneDeviceStrategy("cpu:0").run(step, (router, weights, x))[1])
        0.15234375

        Experts over replicas:

        >>> strategy = MirroredStrategy()
        >>> placed = partition.place(strategy, weights, partition.Rules([], partition.Shard(0)))
        >>> def step(router, weights, x):
        ...     y, _ = jaxdist.nn.experts(
        ...         lambda w, rows: rows @ w, router, weights, x, top_k=2, axis="replica")
        ...     return y
        >>> rows = jax.device_put(jnp.tile(x, (2, 1, 1)), strategy.per_replica_sharding)
        >>> program = strategy.lower(step, (router, placed, rows))
        >>> [c.kind for c in program.traced_collectives]
        ['all_to_all', 'all_to_all']

    Source:
        GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961.
    """
    check_callable(expert, "expert", "Pass a function of the weights of one expert and its rows.")
    tokens = as_tokens(x)
    is_function = callable(router) and not isinstance(router, nnx.Variable)
    scores = as_logits(router, tokens) if is_function else as_router(router, tokens)
    count = scores.shape[-1]
    top_k = as_top_k(top_k, count)
    size = as_group(group, tokens)
    slots = as_capacity(capacity, top_k=top_k, tokens=size, experts=count)
    check_has_weights(weights, count)
    found = find_axis(axis, "experts", allows_replicas=True)
    check_experts(count, found)
    checked = check_result(expert)
    if found is not None and found.is_of_replicas:
        replicas = found
        held, found = open_weights(weights, count, replicas)
        check_uses_only_its_rows(checked, held, tokens, replicas)
    else:
        held = as_weights(weights, count)
    if not tokens.size:
        return _compute_nothing(tokens, scores, held)
    dtype = np.promote_types(wide_dtype(tokens.dtype), wide_dtype(scores.dtype))
    spec = _compat.find_spec_of_type(tokens)
    groups = replicate(tokens).reshape(-1, size, tokens.shape[-1])
    if is_function:
        scores = replicate(scores).reshape(-1, size, count)
    # The facts are those of this trace, so JAX must not reuse the trace of another step.
    _replica.find_notes()
    note_work(
        _compat.find_line_of_model(),
        lambda: list_facts(groups, experts=count, top_k=top_k, slots=slots, axis=found),
    )
    y, balance, dropped = compute_groups(
        checked,
        scores.astype(dtype),
        held,
        groups,
        top_k=top_k,
        capacity=slots,
        axis=found,
    )
    y = y.reshape(tokens.shape)
    y = y if spec is None else jax.sharding.reshard(y, spec)
    choices = top_k * size * groups.shape[0]
    return y, (balance.mean(), dropped.sum().astype(jnp.float32) / choices)


def _compute_nothing(
    tokens: jax.Array, router: jax.Array, weights: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the results for no tokens, which have the gradient 0.

    They depend on all parameters: those that were gathered have a collective in their gradient,
    and a replica without rows has to reach it.
    """
    of_router = tokens + jnp.sum(router).astype(tokens.dtype)
    used = [jnp.sum(w) for w in jax.tree.leaves(weights) if _is_float(w)]
    # There are no numbers to add them to.
    y = sum((u.astype(tokens.dtype) for u in used), of_router)
    balance = jnp.sum(of_router.astype(jnp.float32))
    return y, (balance, jax.lax.stop_gradient(balance))


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
