"""The loss of a pipeline on one device: micro-batches in the same order, with the same sums."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import refuse
from jaxdist._pipeline.derivative import attach_gradients
from jaxdist._pipeline.inputs import StageFns, merge, pick, read_inputs
from jaxdist._pipeline.model import check_model
from jaxdist._validate import show
from jaxdist._values import wide_dtype


def run_plain(
    stage_fns: StageFns,
    parts: Any,
    batch: Any,
    *,
    chunks: int = 1,
    keys: Any = None,
    reduce: str = "mean",
    has_aux: bool = False,
) -> Any:
    """Return the loss of all micro-batches on one device.

    Cost:
        The memory of one micro-batch: its gradients are computed right after its loss, and nothing
        is computed twice.

    Args:
        stage_fns: The functions of the model.
        parts: The parameters of embed, of the layers, and of head.
        batch: Arrays `[micro_batches, rows, ...]`.
        chunks: Whether stacks are `[layers, ...]` (1) or `[chunks, layers / chunks, ...]`.
        keys: Random keys `[micro_batches, rows]`, or None.
        reduce: "mean" or "sum" of the losses of the micro-batches. Losses of layers are a mean
            over micro-batches in both cases.
        has_aux: Whether the head returns `(loss, aux)`. Then the result is `(loss, aux)` with
            arrays `[micro_batches, rows, ...]`, which have no gradients.
    """
    inputs = read_inputs(stage_fns, parts, batch, keys, chunks)
    model = check_model(stage_fns, inputs, inputs.leaves, has_aux=has_aux)
    scale, of_layers = get_factors(reduce, inputs.micro_batches)

    def loss_of_one(parts: list[Any], rows: list[Any]) -> tuple[Any, list[Any]]:
        e, w, h, shared, one, keys = inputs.take_apart([*parts, *rows])
        if chunks > 1:
            w = [a.reshape(-1, *a.shape[2:]) for a in w]
        x, losses = model.run_layers(w, shared, model.embed(e, shared, one), keys, 0)
        loss, aux = model.head(h, shared, x, one)
        return loss if losses is None else loss + losses * of_layers, aux

    split = sum(inputs.counts[:4])

    def value(leaves: list[Any]) -> Any:
        def add(total: Any, rows: list[Any]) -> Any:
            loss, aux = loss_of_one(leaves[:split], rows)
            return total + loss, aux

        total, aux = jax.lax.scan(add, jnp.zeros((), model.loss_dtype), leaves[split:])
        return model.join(total * scale, aux)

    def gradients(wanted: Sequence[bool], leaves: list[Any]) -> tuple[Any, list[Any]]:
        parts, rows = leaves[:split], leaves[split:]
        of_parts, of_rows = wanted[:split], wanted[split:]
        chosen = pick(parts, of_parts)

        def add(sums: Any, rows: list[Any]) -> Any:
            def loss_of(chosen: list[Any], chosen_rows: list[Any]) -> tuple[Any, list[Any]]:
                every = merge(chosen, parts, of_parts)
                return loss_of_one(every, merge(chosen_rows, rows, of_rows))

            total, found = sums
            # `jax.grad` refuses complex numbers.
            loss, pull, aux = jax.vjp(loss_of, chosen, pick(rows, of_rows), has_aux=True)
            g, g_rows = pull(jnp.ones_like(loss))
            # Sums of bfloat16 would lose what is below 1/256 of them.
            found = [a + b.astype(a.dtype) for a, b in zip(found, g, strict=True)]
            return (total + loss, found), (g_rows, aux)

        start = (
            jnp.zeros((), model.loss_dtype),
            [jnp.zeros(a.shape, wide_dtype(a.dtype)) for a in chosen],
        )
        (total, found), (g_rows, aux) = jax.lax.scan(add, start, rows)
        each = iter([g * scale for g in (*found, *g_rows)])
        return model.join(total * scale, aux), [next(each) if w else None for w in wanted]

    return attach_gradients(value, gradients, inputs.leaves)


def get_factors(reduce: str, micro_batches: int) -> tuple[float, float]:
    """Return the factor of the sum of all losses, and that of layers' losses beside the head's.

    The losses of layers are a mean over micro-batches in any case.
    """
    if reduce not in ("mean", "sum"):
        raise refuse(
            f"reduce={show(reduce)}.",
            'reduce is "mean" or "sum".',
            'Pass reduce="sum" where the head divides by the number of all rows, else "mean".',
        )
    return (1 / micro_batches, 1.0) if reduce == "mean" else (1.0, 1 / micro_batches)
