"""Results of a step that are its arguments of the next step, such as parameters."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax

from jaxdist._program.arguments.arguments import is_static, unflatten
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist._values import open_containers


def find_carried_arguments(
    signature: Signature, traced: TracedStep, num_replicas: int
) -> dict[int, int]:
    """Return, for results with the structure of an argument, the number of the matching input.

    The numbers count all results and all inputs, NNX variables first. Each argument is matched
    once, in order. So if `params, momentum` return as `params, momentum`, each finds its own.
    """
    offset = traced.num_graph
    found: dict[int, int] = {}
    # A step that returns one value has one output; a tuple is several outputs.
    outputs = traced.template if isinstance(traced.template, tuple) else (traced.template,)
    free = dict(enumerate(_arguments(signature, traced)[0]))
    for output in outputs:
        out_leaves, out_treedef = jax.tree.flatten(output, is_leaf=is_static)
        for position, argument in free.items():
            leaves, treedef = jax.tree.flatten(argument, is_leaf=is_static)
            if treedef == out_treedef and _can_be_carried(
                signature, traced, leaves, out_leaves, num_replicas
            ):
                pairs = zip(leaves, out_leaves, strict=True)
                found.update({offset + o: offset + a for a, o in pairs if type(a) is Argument})
                del free[position]
                break
    return found


def named_arguments_of(signature: Signature, traced: TracedStep) -> dict[str, Any]:
    """Return all arguments of a call, by their names in messages, with numbers as leaves."""
    args, kwargs = _arguments(signature, traced)
    return {f"args[{i}]": a for i, a in enumerate(args)} | {
        f"kwargs[{k!r}]": v for k, v in kwargs.items()
    }


def _arguments(signature: Signature, traced: TracedStep) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with each traced leaf replaced by its number."""
    # The inputs begin with the variables of NNX objects; those are not among the arguments.
    count = len(signature.inputs) - traced.num_graph
    numbers = [Argument(i) for i in range(count)]
    # The NNX objects are not needed here, so None stands for each.
    nodes: defaultdict[int, None] = defaultdict(lambda: None)
    args, kwargs = unflatten(signature.treedef, signature.slots, numbers, nodes)
    return (
        # Results with containers that JAX does not know are opened, so arguments must be, too.
        [open_containers(a, "argument", must_open=_holds_numbers) for a in args],
        {k: open_containers(v, "argument", must_open=_holds_numbers) for k, v in kwargs.items()},
    )


def _holds_numbers(container: Any) -> bool:
    # A container without traced leaves is static, and results cannot continue it.
    values = container.values() if isinstance(container, Mapping) else container
    return any(type(x) is Argument for x in jax.tree.leaves(list(values)))


def _can_be_carried(
    signature: Signature,
    traced: TracedStep,
    leaves: list[Any],
    out_leaves: list[Any],
    num_replicas: int,
) -> bool:
    """Whether the leaves of a result are arrays with the shapes and dtypes of an argument."""
    for before, after in zip(leaves, out_leaves, strict=True):
        # Static leaves were compared with the structure. They must not match traced ones.
        if (type(before) is Argument) != (type(after) is int):
            return False
        if type(before) is not Argument:
            continue
        slot = signature.inputs[traced.num_graph + before]
        number = traced.num_graph + after
        dtype = traced.jaxpr.outvars[number].aval.dtype
        if slot.local_shape(num_replicas) != traced.shapes[number] or slot.dtype != dtype:
            return False
    return bool(leaves)
