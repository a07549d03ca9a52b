"""JD009: the mean of a function of gradients that FSDP has already reduced."""

import ast
import re
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.names import written

RULE = Rule(
    "JD009",
    "square-under-fsdp",
    "The gradient of a sharded parameter is the mean over the replicas already.",
    "docs/how-to/under-fsdp.md",
)
_GRADIENT = re.compile(r"(\w+_)?(grad|grads|gradient|gradients)$")
_NOT_LINEAR = re.compile(r"(jax\.numpy|jax\.lax|numpy)\.(square|sign|abs|clip|sqrt|power)$")


def find(program: Program) -> Iterator[Finding]:
    """Find means over replicas of squares, signs, sizes and clipped values of gradients."""
    # With gathered parameters, the gradients are those of one replica.
    if not program.uses("fsdp") or program.uses("gather"):
        return
    for reduction in program.events.reductions:
        if not reduction.is_mean_of_replicas:
            continue
        gradient = _find_gradient(reduction.node)
        operation = _find_operation(program, reduction.node)
        if gradient and operation:
            found = (
                f"{reduction.call} takes the mean of {operation} of {gradient}. With "
                "partition.fsdp this is a function of the mean, and not a mean over the replicas."
            )
            fix = (
                "gather the parameters before the function that is differentiated: "
                "whole = partition.gather(params)."
            )
            yield RULE.at(reduction.node, found, fix)


def _find_gradient(call: ast.Call) -> str:
    """Return the first name in a call that looks like gradients; empty if there is none."""
    names = (written(node) for node in ast.walk(call) if isinstance(node, ast.Name))
    return next((name for name in names if _GRADIENT.match(name)), "")


def _find_operation(program: Program, call: ast.Call) -> str:
    """Return the first operation in a call that is not linear; empty if there is none."""
    for node in ast.walk(call):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return f"the power {ast.unparse(node)}"
        if isinstance(node, ast.Name | ast.Attribute):
            name = program.names.find(node)
            if _NOT_LINEAR.match(name):
                return name
    return ""
