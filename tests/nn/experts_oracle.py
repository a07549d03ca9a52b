"""Experts on one array, with the queue of each expert written out, and layouts to hold them to."""

import fractions
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxdist
from jaxdist import get_replica_context, nn, partition

# Replicas, and devices of each.
LAYOUTS = ((8, 1), (4, 2), (2, 4), (1, 8))
EXPERTS, WIDTH, HIDDEN = 8, 6, 10
Params = dict[str, Any]


def make(layout: tuple[int, int], kind: AxisType = AxisType.Auto) -> jaxdist.MirroredStrategy:
    """A strategy of so many replicas, whose devices are the axis of experts."""
    devices = jax.devices()[: math.prod(layout)]
    mesh = jax.make_mesh(layout, ("data", "experts"), axis_types=(kind,) * 2, devices=devices)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def make_params(seed: int = 0, experts: int = EXPERTS) -> Params:
    """A router, and experts of two layers."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (rng.normal(size=shape) / 2).astype(np.float32)

    return {
        "router": draw(WIDTH, experts) * 2,
        "up": draw(experts, WIDTH, HIDDEN),
        "down": draw(experts, HIDDEN, WIDTH),
    }


def make_rows(rows: int = 8, tokens: int = 12, seed: int = 1) -> Any:
    """Rows of tokens, `[rows, tokens, d]`."""
    shape = (rows, tokens, WIDTH)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expert(w: Params, rows: Any) -> Any:
    """What one expert computes."""
    return jnp.tanh(rows @ w["up"]) @ w["down"]


def weights_of(params: Params) -> Params:
    """The weights of all experts."""
    return {"up": params["up"], "down": params["down"]}


def place(strategy: jaxdist.Strategy, params: Params) -> Params:
    """Place each expert on its device, and the router on all."""
    rules = partition.Rules(
        [("up", partition.Split(0)), ("down", partition.Split(0))],
        otherwise=partition.Replicate(),
    )
    return partition.place(strategy, params, rules)


def make_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...] = ("data",),
    replica_axes: tuple[str, ...] = ("data",),
    kind: AxisType = AxisType.Auto,
) -> jaxdist.MirroredStrategy:
    """A strategy over the first devices, with any axes of replicas."""
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=replica_axes)


def place_pieces(
    strategy: jaxdist.Strategy,
    params: Any,
    others: partition.Replicate | partition.Shard | None = None,
    dim: int = 0,
) -> Any:
    """Place experts as pieces over the axis "data" of replicas; `dim` is that of the experts."""
    several = len(strategy.replica_axes) > 1
    pieces = partition.Shard(dim, axes=("data",) if several else None)
    rules = partition.Rules(
        [("up", pieces), ("down", pieces)], otherwise=others or partition.Replicate()
    )
    return partition.place(strategy, params, rules)


def run(
    strategy: jaxdist.Strategy,
    loss_fn: Callable[[Params, Any], Any],
    params: Params,
    x: Any,
    *,
    eagerly: bool = False,
) -> tuple[list[float], Params]:
    """Mean over replicas of the results of a function, and of the gradient of the first one."""

    def step(params: Params, x: Any) -> Any:
        def first(params: Params) -> Any:
            results = loss_fn(params, x)
            results = results if isinstance(results, tuple) else (results,)
            return results[0], results

        context = get_replica_context()
        (_, results), grads = jax.value_and_grad(first, has_aux=True)(params)
        return context.all_reduce("mean", results), context.all_reduce("mean", grads)

    rows = jax.device_put(x, strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(eagerly):
        results, grads = strategy.run(step, (params, rows))
    return [float(r) for r in results], jax.tree.map(np.asarray, partition.gather(grads))


def largest_error(grads: Params, wanted: Params) -> float:
    """The largest difference of a leaf over its largest entry, of all leaves."""
    errors = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30), grads, wanted
    )
    # The `max` of Python passes over nan.
    return float(np.max(jax.tree.leaves(errors)))


def loss_of(params: Params, x: Any, **options: Any) -> Any:
    """A loss, the balance loss and what is dropped."""
    options = {"top_k": 2, **options}
    found = nn.experts(expert, params["router"], weights_of(params), x, **options)
    return _combine(found)


def _combine(found: Any) -> Any:
    y, (balance, dropped) = found
    return (y.astype(jnp.float32) ** 2).mean() + 0.1 * balance, balance, dropped


def run_oracle(params: Params, x: Any, **options: Any) -> tuple[list[float], Params]:
    """The same results and gradient by the oracle."""
    options = {"top_k": 2, "capacity": 1.25, "group": None, **options}
    queues = _walk_queues(x, params["router"], **options)
    size = options["group"] or x.shape[1]

    def first(params: Params) -> Any:
        results = _combine(_compute_all(params, x, *queues, size))
        return results[0], results

    (_, results), grads = jax.value_and_grad(first, has_aux=True)(params)
    return [float(r) for r in results], jax.tree.map(np.asarray, grads)


def _compute_all(params: Params, x: Any, chosen: Any, kept: Any, size: int) -> Any:
    """Every expert computes every token, and the queues say whose results count."""
    experts = params["router"].shape[1]
    probability = jax.nn.softmax(x @ params["router"])
    scores = chosen * probability
    weight = kept * scores / scores.sum(-1, keepdims=True)
    computed = jax.vmap(expert, in_axes=(0, None))(weights_of(params), x)
    y = jnp.einsum("rte,ertd->rtd", weight, computed)

    def of_groups(values: Any) -> Any:
        return values.reshape(-1, size, experts).mean(1)

    share = of_groups(chosen) / chosen.sum(-1).mean()
    balance = (experts * (share * of_groups(probability)).sum(-1)).mean()
    return y, (balance, 1 - kept.sum() / chosen.sum())


def _walk_queues(
    x: Any, router: Any, *, top_k: int, capacity: float | None, group: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """For each row, token and expert: whether the token chose it, and whether it was taken."""
    logits = x @ np.asarray(router)
    rows, tokens, experts = logits.shape
    size = room = group or tokens
    if capacity is not None:
        room = math.ceil(fractions.Fraction(str(capacity)) * top_k * size / experts)
    chosen, kept = np.zeros((2, *logits.shape), np.float32)
    for row in range(rows):
        for start in range(0, tokens, size):
            queues = [0] * experts
            for choice in range(top_k):
                for token in range(start, start + size):
                    order = np.argsort(-logits[row, token], kind="stable")
                    e = int(order[choice])
                    chosen[row, token, e] = 1
                    if queues[e] < room:
                        queues[e] += 1
                        kept[row, token, e] = 1
    return chosen, kept
