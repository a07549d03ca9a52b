"""Reads calls that average over the rows of a batch."""

import ast
from collections.abc import Mapping

from jaxdist._lint.flow.facts import Averaged, Batch, Fact, LocalMean, depends_on_batch
from jaxdist._lint.flow.objects import is_of
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
