"""Reads calls that make objects of jaxdist, and the facts about these objects."""

import ast
from collections.abc import Callable, Mapping

from jaxdist._lint.flow.facts import (
    Batched,
    Checkpoints,
    Dataset,
    Endless,
    Fact,
    Metric,
    Options,
    ReducingUpdate,
    Strategy,
    Variable,
)
from jaxdist._lint.names import written

_DISTRIBUTE = {"experimental_distribute_dataset", "distribute_datasets_from_function"}
_MAKES_STRATEGY = {"get_strategy", "make_strategy", "get_distribution_strategy"}
_LIBRARIES = ("jaxdist", "tensorflow")
_METRICS = ("flax.nnx.metrics.", "flax.nnx.MultiMetric", "keras.metrics.")
_KEEPS_ROWS = {"map", "shuffle", "prefetch", "cache", "repeat", "with_options", "to_iter_dataset"}


def is_of(name: str, *, last: str) -> bool:
    """Return whether a full name is `last`, in jaxdist or TensorFlow."""
    return name.split(".")[0] in _LIBRARIES and name.endswith(f".{last}")


def read_object(
    node: ast.Call, name: str, receiver: Fact | None, arguments: Mapping[object, Fact | None]
) -> Fact | None:
    """Return the fact about the object that a call makes.

    Args:
        node: The call.
        name: The full name of the called function, or ''.
        receiver: The fact about `x` in `x.method()`.
        arguments: The facts about the arguments, by position or name.
    """
    library = name.split(".")[0] if name else ""
    last = written(node.func)
    if library in _LIBRARIES:
        if last.endswith("Strategy") or last in _MAKES_STRATEGY:
            return Strategy(last)
        reader: Callable[..., Fact | None] | None = _OF_LIBRARY.get(last)
        if reader is not None:
            return reader(node)
    if name.startswith(_METRICS):
        return Metric()
    if last == "Optimizer" and isinstance(arguments.get(1), ReducingUpdate):
        return arguments[1]  # nnx.Optimizer(model, tx)
    if last in _DISTRIBUTE:
        options = arguments.get(1, arguments.get("options"))
        has_options = len(node.args) + len(node.keywords) > 1
        # Options from elsewhere are unknown.
        is_split = not has_options or (isinstance(options, Options) and not options.is_even)
        return Dataset(is_uneven=isinstance(arguments.get(0), Batched) and is_split)
    return _read_dataset(node, last, receiver)


def _read_options(node: ast.Call) -> Fact:
    policies = [k.value for k in node.keywords if k.arg == "partial_batch"]
    return Options(is_even=bool(policies) and written(policies[0]) not in {"UNEVEN", "PAD"})


def _read_dataset(node: ast.Call, last: str, receiver: Fact | None) -> Fact | None:
    if last == "repeat" and not node.args and not node.keywords and receiver is None:
        return Endless()
    if last == "batch":
        names = {k.arg: k.value for k in node.keywords}
        drops = names.get("drop_remainder")
        can_drop = drops is not None and getattr(drops, "value", None) is not False
        is_endless = isinstance(receiver, Endless) or "repeat" in names
        return None if can_drop or is_endless else Batched()
    keeps = isinstance(receiver, Batched | Endless) and last in _KEEPS_ROWS
    return receiver if keeps else None


def _read_batches(node: ast.Call) -> Fact | None:
    """Read `data.batches(arrays, size, drop_remainder=)`."""
    drops = [k.value for k in node.keywords if k.arg == "drop_remainder"]
    if drops and getattr(drops[0], "value", None) is not False:
        return None
    size = node.args[1] if len(node.args) > 1 else None
    rows = _count_rows(node.args[0]) if node.args else None
    if rows is not None and isinstance(size, ast.Constant) and isinstance(size.value, int):
        return Batched() if size.value < 1 or rows % size.value else None
    return Batched()


def _count_rows(node: ast.expr) -> int | None:
    """Return the rows of `np.ones(20)` or `np.zeros((20, 3))`."""
    if not isinstance(node, ast.Call) or written(node) not in {"ones", "zeros", "arange"}:
        return None
    first = node.args[0] if node.args else None
    if isinstance(first, ast.Tuple) and first.elts:
        first = first.elts[0]
    value = first.value if isinstance(first, ast.Constant) else None
    return int(value) if isinstance(value, int | float) and len(node.args) < 3 else None


# They reduce the gradients themselves.
UPDATES = ("sharded_update", "compressed_update")


def _read_update(node: ast.Call) -> Fact:
    ops = [k.value for k in node.keywords if k.arg == "reduce_op"]
    return ReducingUpdate(written(node), read_op(ops[0]) if ops else "mean")


def read_op(node: ast.expr | None) -> str:
    """Return 'sum' or 'mean' for a reduce op in the program's text, or ''."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value.lower()
    else:
        text = written(node).lower() if node is not None else ""
    return text if text in {"sum", "mean"} else ""


_OF_LIBRARY: dict[str, Callable[[ast.Call], Fact | None]] = {
    "InputOptions": _read_options,
    "batches": _read_batches,
    **dict.fromkeys(UPDATES, _read_update),
    "Checkpoints": lambda _: Checkpoints(),
    "Variable": lambda _: Variable(),
}
