"""Runs `evaluate` and `predict`: every example counts exactly once."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._strategies import Strategy
from jaxdist._validate import as_integer
from jaxdist._values import is_per_replica
from jaxdist.errors import ShapeError
from jaxdist.fit._callbacks.base import Callback, CallbackList
from jaxdist.fit._loop.arguments import MOST, as_batch_size, read_examples
from jaxdist.fit._loop.feed import distribute_padded, limit_elements
from jaxdist.fit._loop.progress import as_verbose, print_result

# How many batches may be on the devices before the oldest result is fetched.
_MOST_PENDING = 3


@called("fit.Model.evaluate")
def evaluate(
    model: Any,
    data: tuple[Any, Any, Any],
    batch_size: int | None,
    steps: int | None,
    verbose: Any,
    callbacks: Sequence[Callback],
) -> dict[str, float]:
    """Return the loss and the metrics of `(x, y, sample_weight)`; see `Model.evaluate`."""
    model.get_compiled("evaluate")
    examples = read_examples(*data, needs_y=True)
    size = as_batch_size(batch_size, examples)
    steps = None if steps is None else as_integer("steps", steps, least=1, most=MOST)
    prints = as_verbose(verbose) and model.writes_logs
    each = CallbackList(callbacks, model, {"steps": steps, "verbose": verbose})
    logs = measure(model, data[0] if examples is None else examples, size, steps, each)
    if prints:
        print_result(logs)
    return logs


def measure(
    model: Any, source: Any, batch_size: int, steps: int | None, callbacks: CallbackList
) -> dict[str, float]:
    """Return the loss and the metrics over the batches of a source."""
    with callbacks.in_evaluation():
        return _measure(model, source, batch_size, steps, callbacks)


def _measure(
    model: Any, source: Any, batch_size: int, steps: int | None, callbacks: CallbackList
) -> dict[str, float]:
    compiled, strategy = model.get_compiled("evaluate"), model.strategy
    begins, ends = callbacks.has("on_test_batch_begin"), callbacks.has("on_test_batch_end")
    callbacks.call("on_test_begin", {})
    total: Any = 0.0
    pending: deque[Any] = deque()
    data = iter(distribute_padded(strategy, limit_elements(source, steps), batch_size))
    index = -1
    for index, (batch, mask) in enumerate(itertools.islice(data, steps)):
        if begins:
            callbacks.call("on_test_batch_begin", index, {})
        pending.append(strategy.run(compiled.evaluate_step, (model.module, batch, mask)))
        while len(pending) > (0 if ends else _MOST_PENDING):
            total = total + np.asarray(pending.popleft(), np.float64)
        if ends:
            callbacks.call("on_test_batch_end", index, compiled.steps.results(total))
    for vector in pending:
        total = total + np.asarray(vector, np.float64)
    if index < 0 or not compiled.steps.count(total):
        raise _make_empty_error(index + 1)
    logs: dict[str, float] = compiled.steps.results(total)
    callbacks.call("on_test_end", logs)
    return logs


@called("fit.Model.predict")
def predict(
    model: Any,
    x: Any,
    batch_size: int | None,
    steps: int | None,
    verbose: Any,
    callbacks: Sequence[Callback],
) -> Any:
    """Return the outputs for all examples; `Model.predict` documents it."""
    examples = read_examples(x, None, None)
    size = as_batch_size(batch_size, examples)
    steps = None if steps is None else as_integer("steps", steps, least=1, most=MOST)
    as_verbose(verbose)
    each = CallbackList(callbacks, model, {"steps": steps, "verbose": verbose})
    source = x if examples is None else examples
    with each.in_evaluation():
        return _predict(model, source, size, steps, each)


def _predict(
    model: Any, source: Any, batch_size: int, steps: int | None, each: CallbackList
) -> Any:
    strategy: Strategy = model.strategy
    begins, ends = each.has("on_predict_batch_begin"), each.has("on_predict_batch_end")
    each.call("on_predict_begin", {})
    found: list[Any] = []
    pending: deque[Any] = deque()
    data = iter(distribute_padded(strategy, limit_elements(source, steps), batch_size))
    for index, (batch, mask) in enumerate(itertools.islice(data, steps)):
        if begins:
            each.call("on_predict_batch_begin", index, {})
        outputs = strategy.run(model.get_predict_step(), (model.module, batch))
        pending.append((outputs, mask))
        while len(pending) > (0 if ends else _MOST_PENDING):
            found.append(_fetch_rows(strategy, *pending.popleft()))
        if ends:
            each.call("on_predict_batch_end", index, {})
    found += [_fetch_rows(strategy, *entry) for entry in pending]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *found) if found else None
    if not found or any(not leaf.shape[0] for leaf in jax.tree.leaves(whole)):
        raise _make_empty_error(len(found))
    each.call("on_predict_end", {})
    return whole


def _fetch_rows(strategy: Strategy, outputs: Any, mask: Any) -> Any:
    """Return the rows of all replicas without padding, on the host."""
    count = strategy.num_replicas_in_sync

    def gather(leaf: Any) -> np.ndarray:
        if is_per_replica(leaf):
            return np.asarray(strategy.gather(leaf, 0))
        # A plain array is proved equal on all replicas, so each of them has these rows.
        return np.concatenate([np.asarray(leaf)] * count)

    rows = jax.tree.map(gather, outputs, is_leaf=is_per_replica)
    if mask is None:
        return rows
    is_real = gather(mask).astype(bool)
    return jax.tree.map(lambda leaf: leaf[is_real], rows)


def _make_empty_error(batches: int) -> ShapeError:
    found = f"whose batches ({batches}) have no examples" if batches else "without batches"
    return refuse(
        f"x, a dataset {found}.",
        "It needs at least one example. A generator can be read only once.",
        "Pass arrays, or a dataset that starts again at each iter().",
        kind=ShapeError,
    )
