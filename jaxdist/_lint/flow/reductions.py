"""Reads calls that reduce a value over replicas, and the facts about their results."""

import ast
import dataclasses

from jaxdist._lint.flow.facts import (
    Averaged,
    Batch,
    Fact,
    LocalMean,
    Reduced,
    ReducingUpdate,
    Strategy,
    depends_on_batch,
)
from jaxdist._lint.flow.objects import read_op
from jaxdist._lint.names import written

REPLICAS = "replicas"
_OF_LAX = {"psum": "sum", "pmean": "mean"}
_UPDATES = {"update", "apply_gradients"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A reduction: its name, its op, its axes, and the value that it reduces."""

    name: str
    op: str
    axes: frozenset[str]
    value: ast.expr


def _find_argument(node: ast.Call, position: int, *names: str) -> ast.expr | None:
    by_name = {k.arg: k.value for k in node.keywords}
    found = next((by_name[name] for name in names if name in by_name), None)
    if found is None and len(node.args) > position:
        return node.args[position]
    return found


def read_reduction(node: ast.Call, name: str, receiver: Fact | None, scope: int) -> Call | None:
    """Return the reduction that a call makes, or None.

    Args:
        node: The call.
        name: The full name of the called function, or ''.
        receiver: The fact about `x` in `x.method()`.
        scope: The number of the function whose local names `axis_name=axis` may use.
    """
    last = written(node.func)
    if name in {f"jax.lax.{last}"} and last in _OF_LAX:
        axes = _find_argument(node, 1, "axis_name")
        value = _find_argument(node, 0, "x")
        groups = any(k.arg == "axis_index_groups" for k in node.keywords)
        if axes is None or value is None or groups:
            return None
        return Call(f"lax.{last}", _OF_LAX[last], _read_axes(axes, scope), value)
    if last == "all_reduce" and isinstance(node.func, ast.Attribute):
        value = _find_argument(node, 1, "value")
        op = read_op(_find_argument(node, 0, "reduce_op"))
        # Other libraries have functions of this name, whose first argument is not a reduce op.
        return Call("all_reduce", op, frozenset({REPLICAS}), value) if op and value else None
    if last == "reduce" and isinstance(receiver, Strategy):
        axis = _find_argument(node, 2, "axis")
        value = _find_argument(node, 1, "value")
        op = read_op(_find_argument(node, 0, "reduce_op"))
        if value is None or not isinstance(axis, ast.Constant) or axis.value is not None:
            return None
        return Call("strategy.reduce", op, frozenset({REPLICAS}), value)
    if last in _UPDATES and isinstance(receiver, ReducingUpdate):
        # tx.update(grads, state, params); nnx.Optimizer.update(model, grads)
        position = 1 if len(node.args) == 2 else 0
        value = _find_argument(node, position, "grads", "updates")
        if value is not None:
            return Call(receiver.name, receiver.op, frozenset({REPLICAS}), value)
    return None


def _read_axes(node: ast.expr, scope: int) -> frozenset[str]:
    """Return the axes of a collective. A local name is a separate axis in each function."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    found: set[str] = set()
    for element in elements:
        if isinstance(element, ast.Constant):
            found.add(REPLICAS if element.value == "replica" else str(element.value))
        else:
            found.add(f"{ast.unparse(element)} of {scope}")
    return frozenset(found)


def reduced(call: Call, before: Fact | None, node: ast.Call) -> Fact:
    """Return the fact about the result of a reduction, for one leaf."""
    axes = call.axes | (before.axes if isinstance(before, Reduced) else frozenset())
    return Reduced(call.op, axes, node)


def after_operator(op: ast.operator, left: Fact | None, right: Fact | None) -> Fact | None:
    """Return the fact about `left op right`."""
    is_sum = isinstance(op, ast.Add | ast.Sub)
    for kind in (Averaged, LocalMean):
        if is_sum and isinstance(left, kind):
            return left
        if is_sum and isinstance(right, kind):
            return right
    return Batch() if depends_on_batch(left) or depends_on_batch(right) else None
