"""Means over replicas that have different numbers of rows."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxdist.errors import UnevenMeanWarning
from jaxdist.program import _primitives as known
from jaxdist.program._caller import user_stack_level
from jaxdist.program._made_of_nothing import line_of
from jaxdist.program._replication import named_axes
from jaxdist.program._subprograms import subprograms
from jaxdist.values import power_of_two_from

_SUMS = frozenset({"psum", "psum2", "psum_invariant", "jaxdist_all_reduce"})
_PASSED_ON = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim"})


def lines_of_means(program: Any, axes: frozenset[str], num_replicas: int) -> tuple[str, ...]:
    """The lines at which a program divides a sum over the replicas by their number.

    `all_reduce` divides by a power of two before the sum and by the rest after it.
    """
    return tuple(dict.fromkeys(_means(program, axes, num_replicas)))


def _means(program: Any, axes: frozenset[str], num_replicas: int) -> Iterator[str]:
    jaxpr = getattr(program, "jaxpr", program)
    divided_before = power_of_two_from(num_replicas)
    divided_after = num_replicas / divided_before
    shares: set[Any] = set()
    sums: dict[Any, str] = {}
    sums_of_shares: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        first = None if not eqn.invars or isinstance(eqn.invars[0], Literal) else eqn.invars[0]
        if name in _SUMS and (name in known.CALLS or frozenset(named_axes(eqn.params)) >= axes):
            line = line_of(eqn)
            sums.update(dict.fromkeys(eqn.outvars, line))
            if any(not isinstance(v, Literal) and v in shares for v in eqn.invars):
                sums_of_shares.update(dict.fromkeys(eqn.outvars, line))
                if divided_after == 1:
                    yield line
        elif name in _PASSED_ON:
            for held in (sums, sums_of_shares):
                if first in held:
                    held.update(dict.fromkeys(eqn.outvars, held[first]))
            if first in shares:
                shares.update(eqn.outvars)
        elif name == "mul" and any(_is(v, 1 / divided_before) for v in eqn.invars):
            shares.update(eqn.outvars)
        elif name == "div" and first in sums and _is(eqn.invars[1], num_replicas):
            yield sums[first]
        elif name == "div" and first in sums_of_shares and _is(eqn.invars[1], divided_after):
            yield sums_of_shares[first]
        elif name not in _SUMS:
            for inner in subprograms(eqn):
                yield from _means(inner, axes, num_replicas)


def _is(atom: Any, number: float) -> bool:
    if not isinstance(atom, Literal) or np.size(atom.val) != 1:
        return False
    return bool(np.isclose(np.asarray(atom.val).item(), number))


def warn_of_means(where: str, lines: Sequence[str], rows: Sequence[int], step: str) -> None:
    """Say that a step takes means of replicas that have these numbers of rows."""
    warnings.warn(
        f"{where}: the replicas have {list(rows)} rows in {step}, and it takes the mean over the "
        f"replicas at {', '.join(lines[:4])}.\n\n"
        "Each replica counts the same there, and not each example: a row on a replica with fewer "
        "rows counts more, and a replica without rows counts as zero.\n\n"
        "For the mean over the examples: loss = jaxdist.nn.compute_average_loss(losses, "
        "global_batch_size=all_reduce('sum', x.shape[0])), and all_reduce('sum', grads). To leave "
        "such batches out: drop_remainder=True, or InputOptions(partial_batch=PartialBatch.DROP). "
        "If it is meant, silence this with warnings.filterwarnings('ignore', "
        "category=jaxdist.errors.UnevenMeanWarning).",
        UnevenMeanWarning,
        stacklevel=user_stack_level(),
    )
