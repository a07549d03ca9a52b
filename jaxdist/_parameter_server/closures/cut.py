"""An optax transformation, cut into one update program for each variable.

# Note [Cut of an optimizer]
`tx.update` is one function of all gradients, all parameters and the state. A server has some of the
variables, and updates one of them when its gradient comes. So the update is traced once, and for
each parameter everything is dropped that its next value does not need. What is left shows which
leaves of the state it needs (its slots), and whether it needs gradients or values of other
variables. A leaf of the state that depends on no gradient, such as a count of steps, becomes a slot
of each variable that needs it.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxdist import _compat
from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server.closures.optimizer_trace import CALLER, OptimizerTrace
from jaxdist._parameter_server.closures.row_pieces import RowInterpreter
from jaxdist._parameter_server.protocol import RegisterUpdate, as_array
from jaxdist._parameter_server.server import compute_digest
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import UnsupportedError
from jaxdist.training import require_extra


@dataclasses.dataclass(frozen=True)
class UpdateOfShape:
    """The update program of variables of one shape.

    Args:
        key: A hash of the program: equal programs have one key.
        program: The bytes of the exported `f(value, *slots, grad) -> (value, *slots)`.
        init: The bytes of the exported `init(value) -> slots`; None without slots.
    """

    key: str
    program: bytes
    init: bytes | None

    def make_request(
        self, owner: str, name: str, num_slots: int, slots: Sequence[np.ndarray] | None, prefix: str
    ) -> RegisterUpdate:
        """Return the request that gives the program to the server of a variable.

        Args:
            owner: The optimizer: two of them may have equal programs, and each has its own state.
            name: The variable on the servers.
            num_slots: How many slots it gets.
            slots: Their first values; None where `init` makes them.
            prefix: The names of its slots; see `RegisterUpdate`.
        """
        init = None if self.init is None else as_array(self.init)
        key = f"{owner}-{self.key}"
        return RegisterUpdate(key, as_array(self.program), num_slots, {name: slots}, init, prefix)


@dataclasses.dataclass(frozen=True)
class VariableUpdate:
    """How one variable is updated.

    Args:
        name: The path of the parameter in its pytree.
        slots: The paths of its slots in the state of the optimizer.
        by_shape: The program for the shape of the variable, or of each of its shards.
    """

    name: str
    slots: tuple[str, ...]
    by_shape: Mapping[tuple[int, ...], UpdateOfShape]


@called(CALLER)
def cut_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    shards: Mapping[str, Sequence[int]] | None = None,
    labels: Sequence[str] | None = None,
    *,
    keeps_unneeded: bool = False,
) -> list[VariableUpdate]:
    """Cut an optax transformation into one update program for each parameter.

    See Note [Cut of an optimizer].

    Args:
        tx: The transformation.
        params: A pytree of arrays or of `jax.ShapeDtypeStruct`s.
        shards: The number of rows of each shard, for each parameter in shards along dim 0, by the
            path of the parameter, such as `embedding.table`.
        labels: The names of the parameters in errors; None means their paths.
        keeps_unneeded: Whether to keep state of a parameter that its updates do not need, such as
            an average of its values that is read at the end.

    Returns:
        For each parameter its update, in the order of the leaves.

    Raises:
        ArgumentTypeError: `tx` is not a transformation.
        ArgumentError: `shards` does not fit, or the transformation cannot be traced.
        UnsupportedError: The update of one variable needs others, or that of a shard other shards.
        MissingExtraError: flatbuffers is not installed.
    """
    require_extra("grpcio", "export the update of an optimizer")
    if not isinstance(tx, optax.GradientTransformation):
        raise refuse_type(
            f"the optimizer {show(tx)}.",
            "An optimizer is an optax.GradientTransformation.",
            "Pass for instance optax.adam(1e-3); of optax.MultiSteps its "
            "gradient_transformation().",
        )
    traced = OptimizerTrace(optax.with_extra_args_support(tx), params, labels)
    rows = _check_shards(shards or {}, traced)
    exported: dict[str, UpdateOfShape] = {}
    kept = _find_unneeded(traced) if keeps_unneeded else {}
    return [
        _cut_leaf(traced, i, rows.get(name), exported, kept.get(i, ()))
        for i, name in enumerate(traced.names)
    ]


def _find_unneeded(traced: OptimizerTrace) -> dict[int, list[int]]:
    """Return by parameter the state that is computed from it, and that no update needs."""
    needed = {j for i in range(traced.count) for j in traced.find_needed(i)[0]}
    found: dict[int, list[int]] = {}
    for j in set(range(len(traced.slots))) - needed:
        _, _, inputs = traced.find_needed(traced.count + j)
        owners = sorted({n for n in map(traced.get_owner, inputs) if n is not None})
        if owners:
            # If there are several, it is checked and refused as one that couples parameters.
            found.setdefault(owners[0], []).append(j)
    return found


def _check_shards(
    shards: Mapping[str, Sequence[int]], traced: OptimizerTrace
) -> dict[str, tuple[int, ...]]:
    shapes = dict(zip(traced.names, traced.leaves, strict=True))
    for name, rows in shards.items():
        shape = shapes[name].shape if name in shapes else None
        if not shape or sum(rows) != shape[0] or min(rows, default=0) < 0:
            there = "not a parameter" if shape is None else f"of shape {list(shape)}"
            raise refuse(
                f"shards of {list(rows)} rows for {name!r}, which is {there}.",
                "Shards are along dim 0, and together have all its rows.",
                f"The parameters are {', '.join(traced.names[:10])}.",
            )
    return {name: tuple(rows) for name, rows in shards.items()}


def _cut_leaf(
    traced: OptimizerTrace,
    leaf: int,
    rows: tuple[int, ...] | None,
    exported: dict[str, UpdateOfShape],
    kept: Sequence[int] = (),
) -> VariableUpdate:
    slots, program, needed = traced.find_needed(leaf, kept)
    first, of_init = _compat.drop_unused(traced.init, slots)
    for found, inputs in ((program, needed), (first, of_init)):
        _check_alone(traced, leaf, found, inputs)
    whole = traced.leaves[leaf]

    def export_for(shape: tuple[int, ...]) -> UpdateOfShape:
        """Return the exported programs for the whole parameter, or for a shard of it."""
        value = jax.ShapeDtypeStruct(shape, whole.dtype)
        evaluate, avals = _evaluate, [traced.slots[j] for j in slots]
        if shape != whole.shape:
            pieces = RowInterpreter(traced.labels[leaf], whole.shape[0], shape[0])
            evaluate, avals = pieces.compute, [pieces.get_local_aval(x) for x in avals]

        def update(value: Any, *rest: Any) -> tuple[Any, ...]:
            *held, grad = rest
            known = {leaf: grad, traced.count + len(traced.slots) + leaf: value}
            known |= {traced.count + j: x for j, x in zip(slots, held, strict=True)}
            return tuple(evaluate(program, [known[n] for n in needed]))

        def init(value: Any) -> tuple[Any, ...]:
            return tuple(evaluate(first, [value] if of_init else []))

        given = [value, *avals, value]
        text = _describe_programs(jax.make_jaxpr(update)(*given), jax.make_jaxpr(init)(value))
        if text not in exported:
            made = _export(update, given)
            key = compute_digest(made.mlir_module())[:32]
            of_slots = bytes(_export(init, [value]).serialize()) if slots else None
            exported[text] = UpdateOfShape(key, bytes(made.serialize()), of_slots)
        return exported[text]

    shapes = [whole.shape] if rows is None else [(n, *whole.shape[1:]) for n in dict.fromkeys(rows)]
    by_shape = {shape: export_for(shape) for shape in shapes}
    return VariableUpdate(traced.names[leaf], tuple(traced.slot_names[j] for j in slots), by_shape)


def _evaluate(program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    return list(jaxpr_as_fun(program)(*arguments))


def _export(fn: Callable[..., Any], given: Sequence[Any]) -> export.Exported:
    # A server computes on its CPU, whatever the devices of this process are.
    return export.export(jax.jit(fn), platforms=["cpu"])(*given)


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _describe_programs(*programs: ClosedJaxpr) -> str:
    """Return a string that is equal for equal programs."""
    parts: list[str] = []
    for program in programs:
        parts.append(_ADDRESS.sub("", str(program)))
        # The string of a program does not contain the values of constants.
        parts += [f"{c.dtype}{c.shape}{c.tobytes().hex()}" for c in map(np.asarray, program.consts)]
    return "\n".join(parts)


def _check_alone(
    traced: OptimizerTrace, leaf: int, program: ClosedJaxpr, needed: Sequence[int]
) -> None:
    """Check that a program needs no gradient or value of another variable."""
    # `init` has only the parameters as inputs, whose numbers are those of gradients.
    owners = [traced.get_owner(n) for n in needed]
    others = sorted({n for n in owners if n is not None} - {leaf})
    if others:
        names = ", ".join(repr(traced.labels[n]) for n in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        name, where = _find_coupling(program, owners)
        raise UnsupportedError(
            f"{CALLER}: the optimizer couples variables: the update of "
            f"{traced.labels[leaf]!r} needs {names}{more}, {where}.\n\n"
            "A server updates each variable by itself, when its gradient comes, and the variables "
            "are on several servers.\n\n"
            f"{_advise(name)}"
        )


def _advise(name: str | None) -> str:
    """Return what to do without a transformation that couples variables."""
    if name == "apply_if_finite":
        return (
            "Give the server the transformation that apply_if_finite wraps. In the step, set "
            "gradients to zero if one of them is not finite: grads = jax.tree.map(lambda g: "
            "jnp.where(is_finite, g, 0), grads)."
        )
    call = f"{name}(...)"
    if name is None or not name.startswith("clip"):
        return (
            f"Leave {name or 'this transformation'} out, and compute it from all gradients in "
            "the step, before they are sent. Give the server the rest of the chain."
        )
    call = "clip_by_global_norm(1.0)" if name == "clip_by_global_norm" else call
    return (
        "Apply this transformation to the gradients in the step, before they are sent: grads, _ = "
        f"optax.{call}.update(grads, optax.EmptyState()). Give the server the rest of the chain."
    )


_UPDATE = re.compile(r"(\w+)\.<locals>\.(update\w*|init\w*)$")


def _find_coupling(program: ClosedJaxpr, owners: Sequence[int | None]) -> tuple[str | None, str]:
    """Return which transformation first puts values of two variables together, and where."""
    of: dict[Any, frozenset[int]] = {
        v: frozenset() if owner is None else frozenset({owner})
        for v, owner in zip(program.jaxpr.invars, owners, strict=True)
    }
    for eqn in program.jaxpr.eqns:
        # A literal cannot be hashed.
        found = [of[v] for v in eqn.invars if not isinstance(v, Literal) and v in of]
        joined = frozenset[int]().union(*found)
        if len(joined) > 1:
            functions = map(_UPDATE.match, _compat.find_functions(eqn))
            name = next((f.group(1) for f in functions if f is not None), None)
            where = _compat.find_source(eqn)
            return name, f"in {where}" if name is None else f"because of {name} ({where})"
        of.update((v, joined) for v in eqn.outvars)
    return None, "in one operation"
