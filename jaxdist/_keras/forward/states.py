"""Merges the non-trainable variables that the replicas assign in a step."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._keras.forward import marks
from jaxdist._keras.forward.aligned import may_vary
from jaxdist._keras.forward.pairs import Call, Pair, Pairs
from jaxdist._keras.listing import find_aggregations
from jaxdist._keras.models import name_of
from jaxdist._keras.rows import Rows
from jaxdist._program import (
    Dependence,
    ForwardAnalysis,
    Interpreter,
    growth,
    iterate_equations,
    open_jaxpr,
)
from jaxdist.errors import StateDivergenceError


class Law(enum.Enum):
    """How the value of a variable after a step follows from the values of the replicas."""

    KEEP = "keep"  # all replicas have this value
    MEAN = "mean"  # the mean over the replicas, weighted by rows
    ADD = "add"  # the old value plus the additions of all replicas
    FIRST = "first"  # the value of replica 0


@dataclasses.dataclass(frozen=True)
class Laws:
    """The laws of the variables that a step has assigned.

    Args:
        by_number: The law of each variable, by its number among the non-trainable ones.
        together: The variables with the law `ADD` whose additions do not depend on the old value of
            another such variable.
    """

    by_number: Mapping[int, Law]
    together: frozenset[int] = frozenset()

    def find_groups(self) -> list[list[int]]:
        """Return the variables with the law `ADD`, in groups that can be set to zero together."""
        numbers = [n for n, law in self.by_number.items() if law is Law.ADD]
        groups = [[n] for n in numbers if n not in self.together]
        return [*groups, sorted(self.together)] if self.together else groups

    def take_kept_of_first(self) -> "Laws":
        """Return laws that take the equal values of `KEEP` from replica 0."""
        return Laws({n: Law.FIRST for n, law in self.by_number.items() if law is Law.KEEP})


def find_laws(call: Call, pairs: Pairs, new: Sequence[Any]) -> Laws:
    """Return the laws of the variables that a call of the model assigned.

    Args:
        call: The call.
        pairs: The traces of the model.
        new: The values of the non-trainable variables after the call.

    Raises:
        StateDivergenceError: A variable of a user's layer has a different value on each replica,
            and there is no way to merge them.
    """
    model, rows = call.model, call.rows
    changed = [n for n, (a, b) in enumerate(zip(call.fixed, new, strict=True)) if a is not b]
    aggregations = find_aggregations(model)
    of_keras = [n for n in changed if n not in aggregations]
    found = {n: Law.MEAN if _has_mean(new[n]) else Law.KEEP for n in of_keras}
    others = [n for n in changed if n in aggregations]
    if not others or rows.count == 1:
        return Laws({**found, **dict.fromkeys(others, Law.KEEP)})
    # Every replica decides from the same two numbers of rows.
    size = max(rows.most, 2)
    sizes = size, rows.total if rows.total > size else size + 1
    pair = pairs.find(call, sizes)
    question = "laws", tuple(others)
    if question not in pair.proved:
        dtypes = {n: new[n].dtype for n in others}
        proof = _Proof(pair, frozenset(rows.replica.strategy.layout.replica_axes))
        pair.proved[question] = _decide_all(model, proof, aggregations, dtypes, rows.count)
    laws: Laws = pair.proved[question]
    return Laws({**found, **laws.by_number}, laws.together)


def _decide_all(
    model: Any,
    proof: "_Proof",
    aggregations: Mapping[int, str],
    dtypes: Mapping[int, Any],
    count: int,
) -> Laws:
    """Return the laws of the variables that have these dtypes."""
    found: dict[int, Law] = {}
    refused: dict[int, str] = {}
    for n, dtype in dtypes.items():
        if not proof.differs(n):
            found[n] = Law.KEEP
            continue
        law, why = proof.decide(n, aggregations[n], dtype)
        if law is None:
            refused[n] = why
        else:
            found[n] = law
    if refused:
        raise _make_error(model, refused, count)
    added = {n for n, law in found.items() if law is Law.ADD}
    return Laws(found, frozenset(n for n in added if not proof.reads(n) & (added - {n})))


def check_assigned_in_loss(model: Any, laws: Laws, numbers: frozenset[int]) -> None:
    """Check the variables that `compute_loss` assigned.

    Args:
        model: The model.
        laws: The laws of the variables that the step assigned.
        numbers: The variables that `compute_loss` assigned.

    Raises:
        StateDivergenceError: The layers also assigned one of them, differently on each replica.
    """
    own = find_aggregations(model)
    twice = [n for n in sorted(numbers) if n in own and laws.by_number[n] is not Law.KEEP]
    if twice:
        paths = [model.non_trainable_variables[n].path for n in twice]
        raise StateDivergenceError(
            f"The call and compute_loss of the Keras model {name_of(model)!r} both assign state of "
            f"your own layers: {paths}.\n\n"
            "In the call each replica has a value from its own rows. compute_loss gets all rows, "
            "and runs before the values of the replicas are merged.\n\n"
            "Assign it in one of them, or make the value equal in the layer: "
            "jaxdist.get_replica_context().all_reduce('sum', value)."
        )


class _Proof:
    """The facts that two traces of one call show about its variables."""

    def __init__(self, pair: Pair, axes: frozenset[str]) -> None:
        self._one, self._more, self._axes = pair.one, pair.more, axes
        one = pair.one
        inputs = [frozenset[tuple[str, int]]()] * len(one.closed.jaxpr.invars)
        for n in range(one.num_fixed):
            inputs[one.input_of(n)] = frozenset({("old", n)})
        self._reads = _Reads().run(one.closed, inputs)

    def differs(self, number: int) -> bool:
        """Whether the new value may depend on the rows, their number, or the replica."""
        one, more = self._one, self._more
        if one.is_changed(number) != more.is_changed(number):
            return True
        programs = (one.closed, one.result_of(number)), (more.closed, more.result_of(number))
        own = [n == 0 or n >= one.first_of_rows for n in range(len(one.closed.jaxpr.invars))]
        return may_vary(*programs, own, self._axes)

    def reads(self, number: int) -> set[int]:
        """Return the variables whose old values the new value depends on."""
        found = self._reads[self._one.result_of(number)]
        return {n for kind, n in found if kind == "old"}

    def decide(self, number: int, aggregation: str, dtype: Any) -> tuple[Law | None, str]:
        """Return the law of a variable that differs between replicas; or None, and the reason."""
        one = self._one
        jaxpr = open_jaxpr(one.closed)
        variable = jaxpr.invars[one.input_of(number)]
        grown = growth(jaxpr, variable, one.result_of(number))
        is_added = aggregation == "sum" and grown is Dependence.SUM
        if aggregation == "none":
            return None, "it has no aggregation"
        if self._is_read_again(number, is_added):
            return None, "the same step reads it again after it has assigned it"
        if aggregation == "only_first_replica":
            return Law.FIRST, ""
        if aggregation == "mean":
            if jnp.issubdtype(dtype, jnp.inexact):
                return Law.MEAN, ""
            return None, f"its aggregation is 'mean', and {dtype} has no mean"
        if dtype == jnp.bool_:
            return None, "its aggregation is 'sum', and bool has no sum"
        if not is_added:
            return None, "its aggregation is 'sum', and the layer does not only add to it"
        return Law.ADD, ""

    def _is_read_again(self, number: int, is_added: bool) -> bool:
        own = self._one.result_of(number)
        others = [r for n, r in enumerate(self._reads) if n != own]
        if any(("new", number) in r for r in others):
            return True
        # Assigning it twice means reading it again, except for additions.
        names = [marks.name_of_mark(e) for e in iterate_equations(self._one.closed)]
        assigned = [n for n in names if n and marks.number_of_assigned(n) == number]
        return len(assigned) > 1 and not is_added


class _Reads(ForwardAnalysis[frozenset[tuple[str, int]]]):
    """Finds which old and which assigned values of variables a value depends on."""

    of_constants: frozenset[tuple[str, int]] = frozenset()

    def join(self, eqn: Any, aval: Any, first: Any, second: Any) -> Any:
        return first | second

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        return [self.of_constants.union(*inputs)] * len(eqn.outvars)

    def call(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name = marks.name_of_mark(eqn)
        number = None if name is None else marks.number_of_assigned(name)
        results = super().call(eqn, inputs)
        return results if number is None else [r | {("new", number)} for r in results]

    def decide(self, eqn: Any, values: list[Any], decided_by: Any) -> list[Any]:
        return [v | decided_by for v in values]


def share_states(
    laws: Laws, old: Sequence[Any], new: Sequence[Any], added: Mapping[int, Any], rows: Rows
) -> dict[int, Any]:
    """Return the values that this replica sends for the variables to merge."""
    if rows.count == 1:
        return {}
    found: dict[int, Any] = {}
    for n, law in laws.by_number.items():
        if law is Law.KEEP:
            continue
        value = added[n] if law is Law.ADD else new[n]
        if law is Law.FIRST:
            number = value.astype(jnp.int8) if value.dtype == jnp.bool_ else value
            is_first = jnp.asarray(rows.replica.replica_id_in_sync_group) == 0
            found[n] = jnp.where(is_first, number, jnp.zeros_like(number))
        elif rows.own == 0:
            found[n] = jnp.zeros_like(old[n])
        elif law is Law.MEAN:
            found[n] = value * jnp.asarray(rows.fraction, value.dtype)
        else:
            found[n] = value
    return found


def merge_states(
    laws: Laws, old: Sequence[Any], new: Sequence[Any], sums: Mapping[int, Any]
) -> list[Any]:
    """Return the variables after the step; `sums` are the sums of the values that replicas sent."""
    merged = list(new)
    for n, value in sums.items():
        value = value.astype(old[n].dtype)
        merged[n] = old[n] + value if laws.by_number[n] is Law.ADD else value
    return merged


def compute_additions(call: Call, groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Return the additions of this replica to variables: their new values if they began at zero.

    The difference of new and old values would lose small additions to a large sum.

    Args:
        call: The call.
        groups: The numbers of the variables; those of a group are set to zero together.
    """
    if not groups:
        return {}
    rows, forward = call.rows, call.trace(call.rows)
    found: dict[int, Any] = {}
    for group in groups:
        zeroed = [jnp.zeros_like(v) if n in group else v for n, v in enumerate(call.fixed)]
        number = jnp.asarray(rows.replica.replica_id_in_sync_group, jnp.int32)
        inputs = [number, *call.trainable, *zeroed, *jax.tree.leaves(call.x)]
        closed, used = _compat.drop_unused(forward.closed, [forward.result_of(n) for n in group])
        # Results come in the order of the program.
        values = _Evaluation(rows).run(closed, [inputs[n] for n in used])
        found.update(zip(sorted(group), values, strict=True))
    return found


class _Evaluation(Interpreter[Any]):
    """Evaluates a program with marks."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def literal(self, literal: Any) -> Any:
        return literal.val

    def constant(self, variable: Any, value: Any) -> Any:
        return value

    def equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if marks.name_of_mark(eqn) == marks.ADD_UP:
            return [self._rows.add_up(x) for x in inputs]
        # Inline only the calls that JAX inlines too: others have derivatives or loops.
        if eqn.primitive.name in ("jit", "pjit"):
            return self.call(eqn, inputs)
        return self.operation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        return _compat.bind_like(eqn, inputs, eqn.params)


def _has_mean(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _make_error(model: Any, refused: Mapping[int, str], count: int) -> StateDivergenceError:
    variables = model.non_trainable_variables
    listed = "; ".join(f"{variables[n].path}: {why}" for n, why in refused.items())
    return StateDivergenceError(
        f"The Keras model {name_of(model)!r} keeps state that may be different on each of {count} "
        f"replicas: {listed}.\n\n"
        "Each replica calls the layers with its own rows. The aggregation of a variable decides "
        "how their values are merged.\n\n"
        "Pass aggregation= to add_weight: 'sum' if the layer only adds to it (with mixed "
        "precision also autocast=False), 'mean' for floats such as moving averages, "
        "'only_first_replica' for the value of replica 0. Or make the value equal in the layer: "
        "jaxdist.get_replica_context().all_reduce('sum', value); read it before it is assigned."
    )
