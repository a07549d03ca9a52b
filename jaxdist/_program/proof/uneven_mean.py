"""Analysis and warning of means over replicas that have different numbers of rows."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.arguments.caller import user_stack_level
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist._program.proof.made_of_nothing import find_line
from jaxdist._program.proof.replication import NONE, Differs, analyse_equation, get_named_axes
from jaxdist._values import next_power_of_two, share_of_mean
from jaxdist.errors import DivergentCollectiveError, StateDivergenceError, UnevenMeanWarning

_SUMS = frozenset({"psum", "psum2", "psum_invariant", "jaxdist_all_reduce"})
_VALUE_PRESERVING = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim"})
_FILE_OF_MEANS = share_of_mean.__code__.co_filename


def find_lines_of_means(
    program: Any, inputs: Sequence[Differs], axes: frozenset[str], num_replicas: int
) -> tuple[str, ...]:
    """Return the lines at which a program takes a mean over the replicas.

    It divides a sum over the replicas, or the terms of the sum, by the number of replicas.
    `all_reduce("mean")` divides by a power of two before the sum and by the rest after it. A mean
    of values that are equal on all replicas is that value, whatever their rows are.

    Args:
        program: The traced step of one replica.
        inputs: For each input, the axes over which it may differ.
        axes: The replica axes.
        num_replicas: The number of replicas.
    """
    return tuple(dict.fromkeys(_find_means(program, inputs, axes, num_replicas)))


def find_lines_of_averages(averaged: Sequence[Sequence[tuple[int, str]]]) -> tuple[str, ...]:
    """Return the lines at which groups of replicas average over different numbers of rows.

    There each replica assumes that all replicas have as many rows as itself.

    Args:
        averaged: For each group, the numbers of rows and the lines at which it averages.
    """
    if len({tuple(sorted(found)) for found in averaged}) == 1:
        return ()
    rows: dict[str, list[list[int]]] = {}
    for found in averaged:
        for line in {line for _, line in found}:
            rows.setdefault(line, []).append(sorted(n for n, at in found if at == line))
    return tuple(
        f"{line}, where nn.compute_average_loss has no global_batch_size"
        for line, of_groups in rows.items()
        if any(other != of_groups[0] for other in of_groups)
    )


def _find_means(
    program: Any, inputs: Sequence[Differs], axes: frozenset[str], num_replicas: int
) -> Iterator[str]:
    jaxpr = open_jaxpr(program)
    facts = dict.fromkeys(jaxpr.constvars, NONE) | dict(zip(jaxpr.invars, inputs, strict=True))
    # The sets hold variables: terms that were divided before the sum (`shares`), terms that were
    # divided once (`own_means`), and terms that were divided twice (`terms_of_means`).
    divided_before = next_power_of_two(num_replicas)
    divided_after = num_replicas / divided_before
    shares: set[Any] = set()
    own_means: set[Any] = set()
    terms_of_means: set[Any] = set()
    sums: dict[Any, str] = {}
    sums_of_shares: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        first = None if not eqn.invars or isinstance(eqn.invars[0], Literal) else eqn.invars[0]
        differs = [NONE if isinstance(v, Literal) else facts[v] for v in eqn.invars]
        facts.update(zip(eqn.outvars, _analyse(eqn, differs, axes), strict=True))
        if name in _SUMS and not any(differs):
            continue
        if name in _SUMS and (name in known.CALLS or frozenset(get_named_axes(eqn.params)) >= axes):
            line = find_line(eqn)
            sums.update(dict.fromkeys(eqn.outvars, line))
            if any(not isinstance(v, Literal) and v in terms_of_means for v in eqn.invars):
                yield line
            elif any(not isinstance(v, Literal) and v in shares for v in eqn.invars):
                sums_of_shares.update(dict.fromkeys(eqn.outvars, line))
                if divided_after == 1:
                    yield line
        elif name in _VALUE_PRESERVING:
            for held in (sums, sums_of_shares):
                if first in held:
                    held.update(dict.fromkeys(eqn.outvars, held[first]))
            for some in (shares, own_means, terms_of_means):
                if first in some:
                    some.update(eqn.outvars)
        elif _is_share(eqn, divided_before):
            shares.update(eqn.outvars)
        elif name == "div" and first in sums and _is_literal(eqn.invars[1], num_replicas):
            yield sums[first]
        elif (
            name == "div" and first in sums_of_shares and _is_literal(eqn.invars[1], divided_after)
        ):
            yield sums_of_shares[first]
        elif (divisor := _get_divisor(eqn)) is not None:
            # One division is not enough, since 0.5 * sum(x**2) is no mean over two replicas. A
            # mean of the replica's own rows has one division, and the mean over replicas another.
            if first in own_means and np.isclose(divisor, num_replicas):
                terms_of_means.update(eqn.outvars)
            own_means.update(eqn.outvars)
        elif name not in _SUMS:
            for inner in subprograms(eqn):
                inside = _facts_inside(eqn, differs, inner, axes)
                yield from _find_means(inner, inside, axes, num_replicas)


def _analyse(eqn: Any, inputs: Sequence[Differs], axes: Differs) -> list[Differs]:
    try:
        return analyse_equation(eqn, inputs, axes)
    except (DivergentCollectiveError, StateDivergenceError):
        # The analysis of the whole step decides whether this is an error.
        return [axes] * len(eqn.outvars)


def _facts_inside(eqn: Any, inputs: list[Differs], inner: Any, axes: Differs) -> list[Differs]:
    """Return for each input of an inner program the axes over which it may differ."""
    given = inputs[1:] if eqn.primitive.name == "cond" else inputs
    count = len(open_jaxpr(inner).invars)
    is_call = eqn.primitive.name in known.CALLS or eqn.primitive.name == "cond"
    return given if is_call and len(given) == count else [axes] * count


def _is_share(eqn: Any, divided_before: float) -> bool:
    """Whether `all_reduce("mean")` made this product of a term and a share."""
    # The file distinguishes it from a product of the user that looks the same, like 0.5 * x**2.
    if eqn.primitive.name != "mul" or not any(
        _is_literal(v, 1 / divided_before) for v in eqn.invars
    ):
        return False
    return _compat.is_from_file(eqn, _FILE_OF_MEANS)


def _get_divisor(eqn: Any) -> float | None:
    """Return the number by which an equation divides; multiplication by 1/n divides by n."""
    if eqn.primitive.name not in ("mul", "div"):
        return None
    at = eqn.invars[1:] if eqn.primitive.name == "div" else eqn.invars
    for atom in at:
        number = float(np.asarray(atom.val)) if _is_real_number(atom) else 0.0
        if number:
            return number if eqn.primitive.name == "div" else 1 / number
    return None


def _is_real_number(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.size(atom.val) == 1 and not np.iscomplexobj(atom.val)


def _is_literal(atom: Any, number: float) -> bool:
    if not isinstance(atom, Literal) or np.size(atom.val) != 1:
        return False
    return bool(np.isclose(np.asarray(atom.val).item(), number))


def warn_of_means(where: str, lines: Sequence[str], rows: Sequence[int], step: str) -> None:
    """Warn that a step takes a mean over replicas that have these numbers of rows."""
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
