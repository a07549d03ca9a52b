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

_SUMS = frozenset({"psum", "psum2", "psum_invariant", "jaxdist_all_reduce"})
_PASSED_ON = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim"})


def lines_of_means(program: Any, axes: frozenset[str], num_replicas: int) -> tuple[str, ...]:
    """The lines at which a program divides a sum over the replicas by their number."""
    return tuple(dict.fromkeys(_means(program, axes, num_replicas)))


def _means(program: Any, axes: frozenset[str], num_replicas: int) -> Iterator[str]:
    jaxpr = getattr(program, "jaxpr", program)
    sums: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        first = None if not eqn.invars or isinstance(eqn.invars[0], Literal) else eqn.invars[0]
        if name in _SUMS and (name in known.CALLS or frozenset(named_axes(eqn.params)) >= axes):
            sums.update(dict.fromkeys(eqn.outvars, line_of(eqn)))
        elif name in _PASSED_ON and first in sums:
            sums.update(dict.fromkeys(eqn.outvars, sums[first]))
        elif name == "div" and first in sums and _is(eqn.invars[1], num_replicas):
            yield sums[first]
        elif name not in _SUMS:
            for inner in subprograms(eqn):
                yield from _means(inner, axes, num_replicas)


def _is(atom: Any, number: int) -> bool:
    return isinstance(atom, Literal) and np.size(atom.val) == 1 and float(atom.val) == number


def warn_of_means(where: str, lines: Sequence[str], rows: Sequence[int]) -> None:
    """Say that a step takes means of replicas that have these numbers of rows."""
    warnings.warn(
        f"{where}: the replicas of this step have {list(rows)} rows, and it takes the mean over "
        f"the replicas at {', '.join(lines[:4])}.\n\n"
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
