"""Reads calls that average over the rows of a batch, and reductions over replicas."""

import ast
from collections.abc import Mapping

from jaxdist._lint.flow.facts import (
    Averaged,
    Batch,
    Fact,
    LocalMean,
    ReducingUpdate,
    Reduction,
    Strategy,
    depends_on_batch,
)
from jaxdist._lint.flow.objects import is_of, read_op
from jaxdist._lint.names import written

_MEANS = {
    "jax.numpy.mean",
    "jax.numpy.average",
    "jax.numpy.nanmean",
    "numpy.mean",
    "tensorflow.reduce_mean",
    "tensorflow.math.reduce_mean",
}


def read_mean(
    node: ast.Call, name: str, receiver: Fact | None, arguments: Mapping[object, Fact | None]
) -> Fact | None:
    """Return the fact about the result of a call that averages; None for other calls."""
    for last in ("nn.compute_average_loss", "nn.scale_regularization_loss"):
        if is_of(name, last=last):
            return Averaged(node.lineno)
    if name in _MEANS:
        value, first = arguments.get(0), 1
    elif not name and written(node.func) == "mean" and isinstance(node.func, ast.Attribute):
        value, first = receiver, 0
    else:
        return None
    if not depends_on_batch(value):
        return None
    by_name = {k.arg: k.value for k in node.keywords}
    axis = by_name.get("axis", node.args[first] if len(node.args) > first else None)
    return LocalMean(node.lineno) if _is_over_rows(axis) else Batch()


def _is_over_rows(axis: ast.expr | None) -> bool:
    if axis is None:
        return True
    elements = axis.elts if isinstance(axis, ast.Tuple | ast.List) else [axis]
    return any(isinstance(e, ast.Constant) and e.value in (0, None) for e in elements)


def read_division(node: ast.BinOp, left: Fact | None) -> Fact | None:
    """Return the fact about a mean such as `jnp.sum(losses) / losses.shape[0]`, or None."""
    if not isinstance(node.op, ast.Div) or not isinstance(left, Batch):
        return None
    below = node.right
    is_rows = (isinstance(below, ast.Call) and written(below) == "len") or (
        isinstance(below, ast.Subscript)
        and written(below.value) == "shape"
        and isinstance(below.slice, ast.Constant)
        and below.slice.value == 0
    )
    is_total = isinstance(node.left, ast.Call) and written(node.left) == "sum"
    return LocalMean(node.lineno) if is_rows and is_total else None


REPLICAS = "replicas"
_OVER_REPLICAS = frozenset({REPLICAS})
_OF_LAX = {"psum": "sum", "pmean": "mean"}
_UPDATES = {"update", "apply_gradients"}


def _find_argument(node: ast.Call, position: int, *names: str) -> ast.expr | None:
    by_name = {k.arg: k.value for k in node.keywords}
    found = next((by_name[name] for name in names if name in by_name), None)
    if found is None and len(node.args) > position:
        return node.args[position]
    return found


def read_reduction(
    node: ast.Call,
    name: str,
    receiver: Fact | None,
    scope: int,
    facts: Mapping[ast.expr, Fact | None],
) -> Reduction | None:
    """Return the reduction that a call makes, or None.

    Args:
        node: The call.
        name: The full name of the called function, or ''.
        receiver: The fact about `x` in `x.method()`.
        scope: The number of the function whose local names `axis_name=axis` may use.
        facts: The facts about the arguments.
    """
    last = written(node.func)
    if name in {f"jax.lax.{last}"} and last in _OF_LAX:
        axes = _find_argument(node, 1, "axis_name")
        value = _find_argument(node, 0, "x")
        groups = any(k.arg == "axis_index_groups" for k in node.keywords)
        if axes is None or value is None or groups:
            return None
        over = _read_axes(axes, scope)
        return Reduction(node, f"lax.{last}", _OF_LAX[last], over, facts[value])
    if last == "all_reduce" and isinstance(node.func, ast.Attribute):
        value = _find_argument(node, 1, "value")
        op = read_op(_find_argument(node, 0, "reduce_op"))
        # Other libraries have functions of this name, whose first argument is not a reduce op.
        if op and value:
            return Reduction(node, "all_reduce", op, _OVER_REPLICAS, facts[value])
        return None
    if last == "reduce" and isinstance(receiver, Strategy):
        axis = _find_argument(node, 2, "axis")
        value = _find_argument(node, 1, "value")
        op = read_op(_find_argument(node, 0, "reduce_op"))
        if value is None or not isinstance(axis, ast.Constant) or axis.value is not None:
            return None
        return Reduction(node, "strategy.reduce", op, _OVER_REPLICAS, facts[value])
    if last in _UPDATES and isinstance(receiver, ReducingUpdate):
        # tx.update(grads, state, params); nnx.Optimizer.update(model, grads)
        position = 1 if len(node.args) == 2 else 0
        value = _find_argument(node, position, "grads", "updates")
        if value is not None:
            return Reduction(node, receiver.name, receiver.op, _OVER_REPLICAS, facts[value])
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


def after_operator(op: ast.operator, left: Fact | None, right: Fact | None) -> Fact | None:
    """Return the fact about `left op right`."""
    is_sum = isinstance(op, ast.Add | ast.Sub)
    for kind in (Averaged, LocalMean):
        if is_sum and isinstance(left, kind):
            return left
        if is_sum and isinstance(right, kind):
            return right
    return Batch() if depends_on_batch(left) or depends_on_batch(right) else None
