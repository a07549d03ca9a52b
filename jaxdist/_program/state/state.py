"""Checks for state that would differ between replicas, before anything is computed."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist._called import called, name_call
from jaxdist._program.arguments.arguments import is_static
from jaxdist._program.arguments.retrace import user_stack_level
from jaxdist._program.nnx import graph_rules
from jaxdist._program.nnx.graph import GraphShape
from jaxdist._program.nnx.graph_rules import Combination, Rule
from jaxdist._program.proof.dependence import Dependence, Part, growths, part_of_result
from jaxdist._program.proof.moments import is_update
from jaxdist._program.state.carried import named_arguments_of
from jaxdist._program.state.remedy import Role, remedy, role_of
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist._values import Kind, Opened
from jaxdist.errors import StateDivergenceError, StateDivergenceWarning

_TRAINED = (nnx.Param, nnx.OptState)

_OTHER_STATE = (
    "For state that is not trained, use one of these: nnx.BatchStat for values that are averaged "
    "over the replicas, nnx.metrics.MetricState for values that are added up over them, "
    "all_reduce or all_gather of the value before it is written, or a result of the step (a "
    "PerReplica) for a value of each replica. Where a value is the same on all replicas for a "
    "reason that the trace does not show, say so with jaxdist.assume_replicated(value)."
)


@called("strategy.run")
def find_combinations(
    signature: Signature,
    traced: TracedStep,
    differs: Sequence[bool],
    num_replicas: int,
    places: Sequence[Mapping[str, int]],
) -> tuple[Combination, ...]:
    """Return the NNX variables that a collective must make equal after the step, with the rules.

    Args:
        signature: The signature of the step.
        traced: The trace of one replica.
        differs: For each result, whether it may differ between replicas.
        num_replicas: The number of replicas.
        places: The positions of replicas with rows, one for each different trace.

    Raises:
        StateDivergenceError: A variable differs and has no rule, or a metric is not a sum.
    """
    graph = signature.graph
    if graph is None:
        return ()
    diverging: list[int] = []
    integers: list[str] = []
    not_sums: list[str] = []
    # First: the three variables of a Welford metric are not sums one by one.
    moments = _find_moments(graph, traced, places)
    found = [Combination(Rule.MOMENTS, three) for three in moments]
    done = {n for c in found for n in c.numbers}
    grown = {
        i: growths(traced.jaxpr, _input_variable(traced, i))
        for i, kind in enumerate(graph.types)
        if graph_rules.is_metric(kind)
    }
    for i, kind in enumerate(graph.types):
        if i in done:
            continue
        if i in grown:
            # Also if it does not differ: n replicas that all add 1 must add n.
            own = grown[i][i]
            if own is Dependence.SUM:
                found.append(Combination(Rule.SUM, (i,)))
            elif own is not Dependence.SAME:
                not_sums.append(graph.name(i))
        elif differs[i]:
            rule = graph_rules.rule_of(kind)
            if rule is None:
                diverging.append(i)
            elif rule is Rule.MEAN and not _has_mean(traced.jaxpr.outvars[i].aval.dtype):
                integers.append(graph.name(i))
            else:
                found.append(Combination(rule, (i,)))
    if diverging:
        raise _diverging_variables_error(graph, diverging, num_replicas)
    if integers:
        raise StateDivergenceError(
            f"{name_call()} would average {len(integers)} batch statistic(s) of integers or "
            f"booleans that are different on each of {num_replicas} replicas: "
            f"{_list_names(integers)}.\n\n"
            "Batch statistics are averaged over the replicas, and integers have no exact mean.\n\n"
            "Keep them as floats, or make them the same on all replicas inside the step: "
            "jaxdist.get_replica_context().all_reduce('sum', value)."
        )
    if not_sums:
        raise StateDivergenceError(
            f"{name_call()} cannot combine what {num_replicas} replicas put into "
            f"{len(not_sums)} metric variable(s): {_list_names(not_sums)}.\n\n"
            "A metric's variables grow by the sum of what the replicas add to them; the three of "
            "nnx.metrics.Welford by what its update() makes of more values. The step does "
            "something else with these: it sets them again (reset), or keeps a running value of "
            "another kind.\n\n"
            "Call reset() before strategy.run, use nnx.metrics.Average, Accuracy or Welford as "
            "they are, or return the values and update the metric outside: "
            "metric.update(values=strategy.gather(values, 0))."
        )
    _check_metrics_are_apart(graph, grown, found, num_replicas)
    return tuple(found)


@called("strategy.run")
def _check_metrics_are_apart(
    graph: GraphShape,
    grown: Mapping[int, Sequence[Dependence]],
    found: Sequence[Combination],
    num_replicas: int,
) -> None:
    """Raise if a replica adds the value of one metric to another.

    Each replica would add it, so it would count once for each replica. `grown` has for each metric
    how the results depend on it.
    """
    group = {n: c.numbers for c in found for n in c.numbers if n in grown}
    for number, results in grown.items():
        own, source = group.get(number, (number,)), graph.name(number)
        for n in group:
            if n not in own and results[n] is not Dependence.FREE:
                raise StateDivergenceError(
                    f"{name_call()} cannot combine what {num_replicas} replicas put into the "
                    f"metric variable {graph.name(n)}: the amount that each adds depends on "
                    f"another metric variable, {source}.\n\n"
                    "A metric's variables grow by the sum of what the replicas add to them. What "
                    f"{source} holds would be added {num_replicas} times, once by each "
                    "replica.\n\n"
                    f"Add amounts that come from the rows alone, and compute with {source} where "
                    "the metric is read (in compute()). A value that no step changes, such as a "
                    "weight or a threshold, belongs in an nnx.Variable."
                )


def _find_moments(
    graph: GraphShape, traced: TracedStep, places: Sequence[Mapping[str, int]]
) -> list[tuple[int, int, int]]:
    """Return the metrics of count, mean and squared deviations that the step updates with data."""
    jaxpr = traced.jaxpr
    found: list[tuple[int, int, int]] = []
    pairs = zip(traced.operands, jaxpr.invars, strict=True)
    constants = {v: o for o, v in pairs if _is_closed_over_array(o)}
    for three in graph.moments:
        inputs = [_input_variable(traced, i) for i in three]
        results = [jaxpr.outvars[i] for i in three]
        if None not in inputs and is_update(jaxpr, inputs, results, places, constants):
            found.append(three)
    return found


def _is_closed_over_array(operand: Any) -> bool:
    """Whether an operand of a trace is a concrete array that the step closes over."""
    is_array = isinstance(operand, (jax.Array, np.ndarray, np.generic, int, float))
    return type(operand) is not Argument and is_array and not isinstance(operand, jax.core.Tracer)


def _input_variable(traced: TracedStep, number: int) -> Any:
    """Return the input of the traced step that holds argument leaf `number`."""
    pairs = zip(traced.operands, traced.jaxpr.invars, strict=True)
    return next((v for o, v in pairs if type(o) is Argument and o == number), None)


def _has_mean(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@called("strategy.run")
def _diverging_variables_error(
    graph: GraphShape, numbers: Sequence[int], num_replicas: int
) -> StateDivergenceError:
    kinds = [graph.types[i] for i in numbers]
    names = [f"{graph.name(i)} ({graph.types[i].__name__})" for i in numbers]
    remedies = (
        [remedy([("", Role.PARAMETERS)])] if any(issubclass(k, _TRAINED) for k in kinds) else []
    )
    if not all(issubclass(k, _TRAINED) for k in kinds):
        remedies.append(_OTHER_STATE)
    return StateDivergenceError(
        f"{name_call()} would leave {len(names)} NNX variable(s) with a different value on each of "
        f"{num_replicas} replicas: {_list_names(names)}.\n\n"
        "Each of them is one variable, mirrored, and is updated in place on all replicas; they "
        "must all compute the same update.\n\n" + "\n".join(remedies)
    )


@dataclasses.dataclass(frozen=True)
class _ReturnedArgument:
    """An argument that the step returns with the same structure."""

    argument: str
    leaves: tuple[tuple[str, Role], ...]  # mirrored as arguments, different as results
    is_state: bool


@called("strategy.run")
def check_functional_state(
    signature: Signature,
    traced: TracedStep,
    differs: Sequence[bool],
    donated: Sequence[int],
    num_replicas: int,
    where: str,
) -> None:
    """Raise or warn if an argument that looks like state differs between replicas when returned.

    It is certainly state if it is donated, or if the call's arguments contain a node of a
    registered class (such as a TrainState) or an optimizer's state. Then this raises. A plain dict
    that returns with the same structure may be an ordinary result, so there this only warns. A
    single array that returns with an argument's shape is an ordinary result, unless the step moved
    the argument as an optimizer does (`proof.updates`).
    """
    found = _find_returned_arguments(signature, traced, differs, donated)
    certain = [r for r in found if r.is_state]
    if certain:
        leaves = [leaf for r in certain for leaf in r.leaves]
        names = [name for name, _ in leaves]
        raise StateDivergenceError(
            f"{name_call()} would return state that is different on each of {num_replicas} "
            f"replicas: {_list_names(names)}.\n\n"
            f"{certain[0].argument} is passed in equal on all replicas and returned with the same "
            "structure, so it is state. State must be the same on all replicas.\n\n"
            f"{remedy(leaves)}"
        )
    for r in found:
        warnings.warn(
            f"{where}: {r.argument} is passed to strategy.run equal on all replicas and "
            f"returned with the same structure, but different on each of {num_replicas} "
            f"({_list_names([name for name, _ in r.leaves])}).\n\nIf it is state, this is a bug. "
            f"{remedy(r.leaves)}\n\nIf it is "
            "meant, silence this with warnings.filterwarnings('ignore', "
            "category=jaxdist.errors.StateDivergenceWarning).",
            StateDivergenceWarning,
            stacklevel=user_stack_level(),
        )


def _find_returned_arguments(
    signature: Signature, traced: TracedStep, differs: Sequence[bool], donated: Sequence[int]
) -> list[_ReturnedArgument]:
    args = named_arguments_of(signature, traced)
    given_away = {f"args[{i}]" for i in donated}
    outputs = _parts_of_result(traced.template)
    in_state = any(_holds_state_class(a) for a in args.values())
    has_batch = any(i.kind is Kind.PER_REPLICA for i in signature.inputs)
    found = []
    for name, argument in args.items():
        leaves, treedef = jax.tree.flatten(argument, is_leaf=is_static)
        if not any(type(x) is Argument for x in leaves):
            continue
        for output in outputs:
            out_leaves, out_treedef = jax.tree.flatten(output, is_leaf=is_static)
            # Results have no names, so only the structure tells which argument one continues.
            if out_treedef != treedef:
                continue
            names = _find_diverging_leaves(
                name, argument, leaves, out_leaves, signature, traced, differs
            )
            certain = name in given_away or in_state
            # A single array matches the structure of any other one, so look at how it is computed.
            if len(leaves) == 1 and names:
                is_bare = treedef == jax.tree.structure(0)
                # Data added to a bare array do not prove an optimizer, unless the array
                # is certainly state.
                needed = Part.MOVED if certain or not is_bare else Part.UPDATED
                part = _part_of_argument(leaves[0], out_leaves[0], signature, traced)
                certain = certain and (not is_bare or needed <= part <= Part.UPDATED)
                names = names if certain or needed <= part <= Part.UPDATED else []
            if names and (certain or has_batch):
                found.append(_ReturnedArgument(name, tuple(names), certain))
    return found


def _parts_of_result(template: Any) -> list[Any]:
    """Return the result and the elements of its outermost container."""
    parts: list[Any] = [template]
    if isinstance(template, Opened):
        parts += template.values
    elif isinstance(template, dict):
        parts += template.values()
    elif isinstance(template, (tuple, list)):
        parts += template
    return parts


def _part_of_argument(before: int, after: int, signature: Signature, traced: TracedStep) -> Part:
    """Return how one result is computed from one argument."""
    own = {
        variable: signature.inputs[operand].kind is not Kind.MIRRORED
        for operand, variable in zip(traced.operands, traced.jaxpr.invars, strict=True)
        if type(operand) is Argument
    }
    offset = traced.num_graph
    variable = _input_variable(traced, offset + before)
    return part_of_result(traced.jaxpr, variable, own, offset + after)


def _find_diverging_leaves(
    name: str,
    argument: Any,
    leaves: list[Any],
    out_leaves: list[Any],
    signature: Signature,
    traced: TracedStep,
    differs: Sequence[bool],
) -> list[tuple[str, Role]]:
    paths = jax.tree_util.tree_flatten_with_path(argument, is_leaf=is_static)[0]
    names = []
    for (path, _), before, after in zip(paths, leaves, out_leaves, strict=True):
        if type(before) is not Argument or type(after) is not int:
            continue
        slot = signature.inputs[traced.num_graph + before]
        shape = traced.shapes[traced.num_graph + after]
        # A per-replica argument may differ, and another shape is another value.
        if slot.kind is not Kind.MIRRORED or shape != slot.shape:
            continue
        if differs[traced.num_graph + after]:
            leaf = f"{name}{jax.tree_util.keystr(path)}"
            names.append((leaf, role_of(leaf, slot.dtype)))
    return names


def _holds_state_class(argument: Any) -> bool:
    """Whether a pytree contains a node of a registered class, or an optimizer's named tuple."""
    # By the name: optax's named tuples (AdamState) have no common base class.
    is_named = isinstance(argument, tuple) and hasattr(argument, "_fields")
    if is_named and type(argument).__name__.endswith("State"):
        return True
    if isinstance(argument, (tuple, list, dict)):
        inside = argument.values() if isinstance(argument, dict) else argument
        return any(map(_holds_state_class, inside))
    return argument is not None and not jax.tree_util.all_leaves([argument])


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
