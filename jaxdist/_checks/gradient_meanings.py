"""Explains the factor between a step on the replicas and the step on one device."""

import dataclasses

# Factors are medians of ratios of rounded numbers; factors this close count as equal.
_SAME_FACTOR = 0.02


@dataclasses.dataclass(frozen=True)
class Setting:
    """Facts about the step, used to guess the cause of a factor."""

    num_replicas: int
    num_real: int | None = None  # N, the real examples
    num_rows: int | None = None  # B, the replicas times the rows of the largest one
    is_uneven: bool = False
    kinds: tuple[str, ...] = ()  # types of NNX variables, and "random key"
    is_adaptive: bool = False  # the optimizer is, and no compared leaf shows the scale
    strategies: tuple[str, ...] = ()  # names under which the step closes over a strategy


def is_near(a: float, b: float) -> bool:
    """Whether two factors count as equal."""
    return abs(a - b) <= _SAME_FACTOR * abs(b)


def explain_factor(setting: Setting, factor: float | None, *, has_local_state: bool) -> list[str]:
    """Return sentences on the likely cause; `factor` is None if no common factor exists."""
    count = setting.num_replicas
    said: list[str] = []
    if factor is not None:
        if is_near(factor, count):
            said.append(
                f"{count} is the number of replicas: the loss is a mean over the rows of a replica "
                "and the gradients are summed, or they are summed twice. Use "
                "all_reduce('mean', grads) once; or divide the loss by the global batch "
                "(nn.compute_average_loss) and use all_reduce('sum', grads) once."
            )
        if is_near(factor, 1 / count):
            said.append(
                f"1/{count} is one over the number of replicas: the loss is divided by the global "
                "batch (nn.compute_average_loss) and the gradients are averaged as well, or the "
                "loss is a sum over rows and the gradients are averaged. Use "
                "all_reduce('sum', grads) in both cases."
            )
        real, rows = setting.num_real, setting.num_rows
        if real and rows and real != rows and (is_near(factor, real / rows)):
            said.append(
                f"{real}/{rows} is N/B, the real examples over the rows of a full batch: the loss "
                "is divided by rows that hold no example, or replicas without examples count in "
                "the mean. Divide by the real examples of all replicas: "
                "nn.compute_average_loss(loss, global_batch_size=all_reduce('sum', mask.sum())), "
                "then all_reduce('sum', grads)."
            )
        # The factor of an uneven batch depends on the data, so no number identifies it. Report an
        # uneven batch only if no exact ratio explains the factor.
        if not said and setting.is_uneven:
            said.append(f"Likely here: {_UNEVEN}.")
        elif not said:
            said.append(
                f"{factor:.4g} is neither the number of replicas ({count}) nor one over it. Look "
                "for a constant that depends on the number of replicas or on the local batch size."
            )
    elif has_local_state:
        said.append(
            "State that comes back different on each replica was updated with local gradients: "
            "all-reduce them first, grads = context.all_reduce('mean', grads)."
        )
    else:
        said.append(_explain_without_factor(setting))
    if setting.strategies:
        said.append(
            f"The step closes over a strategy ({', '.join(setting.strategies)}). Where it reads "
            f"num_replicas_in_sync from it, it gets {count} on one device too, and the difference "
            "is in this comparison only; read it from jaxdist.get_replica_context()."
        )
    return said


_UNEVEN = (
    "the batch is uneven, and a mean over each replica's own examples counts replicas with few of "
    "them as much as others (divide by the examples of all replicas: nn.compute_average_loss with "
    "global_batch_size, then all_reduce('sum', grads))"
)


def _explain_without_factor(setting: Setting) -> str:
    why = []
    if setting.is_uneven:
        why.append(_UNEVEN)
    if "BatchStat" in setting.kinds:
        why.append(
            "batch statistics are of each replica's rows (BatchStat variables; "
            "check with model.eval(), or batch norm with the statistics all-reduced)"
        )
    if "RngKey" in setting.kinds:
        why.append(
            "every replica draws its own random numbers (dropout; check with model.eval(), or "
            "draw from nn.example_keys)"
        )
    found = f" Kinds of variables among the arguments: {', '.join(setting.kinds)}."
    return (
        "No one factor explains it, so it is no matter of sum or mean alone. "
        + (f"Likely here: {'; '.join(why)}. " if why else "")
        + "In general: batch statistics, dropout, an uneven batch, or gradients that enter the "
        "update in another way than linearly (clipping, weight decay beside a wrong scale, an "
        "adaptive optimizer). A function that returns the all-reduced gradients instead of "
        "applying them tells these apart." + (found if setting.kinds else "")
    )
