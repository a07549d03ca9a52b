"""The loops of `Estimator.evaluate`, where every row counts once, and `Estimator.predict`."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._strategies import Strategy, get_replica_context
from jaxdist._validate import show
from jaxdist._values import PerReplica
from jaxdist.errors import ShapeError
from jaxdist.estimator._hooks import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    call_each,
)
from jaxdist.estimator._model.building import Built
from jaxdist.estimator._model.model_fn import split_batch
from jaxdist.estimator._model.spec import as_pair, count_rows

# Note [Groups of batches]
# Each replica evaluates its own batch, of the size that the dataset has. A group that has
# fewer batches than replicas is filled with copies of its first one, with weight 0; so is a group
# whose batches have different shapes. Nothing is padded, so a loss may be a mean over a batch.


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model with the values of a checkpoint, and the batches that it evaluates or predicts.

    Args:
        built: The model.
        step: The step of the checkpoint.
        batches: The batches.
        hooks: The hooks; `begin` has been called.
    """

    built: Built
    step: int
    batches: Iterator[Any]
    hooks: Sequence[SessionRunHook]

    def open_session(self) -> SessionRunContext:
        """Call `after_create_session` of the hooks, and return the context of the loop."""
        session = Session(self.built.modules, lambda: self.step)
        context = SessionRunContext(session)
        call_each(self.hooks, "after_create_session", session, context)
        return context


def run_evaluation(opened: Opened, steps: int | None) -> dict[str, float]:
    """Return the loss and the metrics as means over all rows.

    Args:
        opened: The model and the batches.
        steps: How many batches to read; None for all.

    Raises:
        ShapeError: There are no rows, or the weights of a metric are all 0.
    """
    built, hooks = opened.built, opened.hooks
    context = opened.open_session()
    totals: list[Any] = []
    replicas = built.strategy.num_replicas_in_sync
    for group in _make_groups(itertools.islice(opened.batches, steps), replicas):
        call_each(hooks, "before_run", context)
        totals.append(_run_group(built, group, replicas, opened.step))
        call_each(hooks, "after_run", context, SessionRunValues({}))
        if context.should_stop():
            break
    result = _divide(jax.device_get(totals))
    call_each(hooks, "end", context.session)
    return result


def _divide(totals: Sequence[Any]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    for total in totals:
        for name, (value, weight) in total.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + float(value), before[1] + float(weight)
    empty = [name for name, (_, weight) in sums.items() if weight <= 0]
    if empty or not sums:
        found = f"weights of {empty[0]!r} that are all 0" if empty else "no rows"
        raise refuse(
            f"input_fn, whose dataset has {found}.",
            "Each result is a mean over the rows.",
            "Let input_fn return a dataset with at least one row whose weight is above 0.",
            kind=ShapeError,
        )
    return {name: value / weight for name, (value, weight) in sums.items()}


def _make_groups(elements: Iterator[Any], replicas: int) -> Iterator[list[Any]]:
    """Yield lists of batches of one shape, at most one for each replica."""
    group: list[Any] = []
    for element in elements:
        if group and (len(group) == replicas or _shapes(element) != _shapes(group[0])):
            yield group
            group = []
        group.append(element)
    if group:
        yield group


def _shapes(element: Any) -> Any:
    leaves, treedef = jax.tree.flatten(element)
    return treedef, [(np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves]


def _run_group(built: Built, group: list[Any], replicas: int, global_step: int) -> Any:
    weights = [np.float32(n < len(group)) for n in range(replicas)]
    filled = group + [group[0]] * (replicas - len(group))
    strategy = built.strategy
    features, labels = split_batch(_join(strategy, filled))
    weight = _join(strategy, weights)
    step = built.programs.setdefault("evaluate", _EvaluateStep(built))
    return strategy.run(step, (built.modules, features, labels, weight, np.int32(global_step)))


def _join(strategy: Strategy, values: Sequence[Any]) -> Any:
    if strategy.num_replicas_in_sync == 1:
        return values[0]
    return jax.tree.map(lambda *xs: PerReplica(list(xs)), *values)


# An object, since each model has its own: a function that is made often is a mistake.
class _EvaluateStep:
    """A step that evaluates."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def __call__(
        self, modules: Any, features: Any, labels: Any, counts: Any, global_step: Any
    ) -> Any:
        spec = self._built.call_model(modules, features, labels, lambda: global_step)
        loss = jnp.asarray(spec.loss, jnp.float32)
        rows = count_rows(features)
        # A scalar is the mean over the rows.
        pairs = {"loss": (loss * rows if loss.ndim == 0 else loss.sum(), jnp.float32(rows))}
        for name, metric in (spec.eval_metric_ops or {}).items():
            values, weights = as_pair(name, metric)
            # `where`: a row of weight 0 may hold nan.
            total = jnp.sum(jnp.where(weights > 0, values * weights, 0.0))
            pairs[name] = (total, weights.sum())
        counted = {
            name: tuple(jnp.where(counts > 0, x, 0.0) for x in pair) for name, pair in pairs.items()
        }
        return get_replica_context().all_reduce("sum", counted)


# An object, since each model has its own: a function that is made often is a mistake.
class _PredictStep:
    """A step that predicts."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def __call__(self, modules: Any, features: Any, global_step: Any) -> Any:
        return self._built.call_model(modules, features, None, lambda: global_step).predictions


def run_prediction(
    opened: Opened, keys: Sequence[str] | None, *, yields_rows: bool
) -> Iterator[Any]:
    """Yield the predictions, row by row or batch by batch.

    Raises:
        ArgumentError: A key is not among the predictions.
        ShapeError: A prediction does not have a row for each row of the batch.
    """
    built, hooks = opened.built, opened.hooks
    context = opened.open_session()
    for element in opened.batches:
        features, _ = split_batch(element)
        call_each(hooks, "before_run", context)
        step = built.programs.setdefault("predict", _PredictStep(built))
        found = built.strategy.run(step, (built.modules, features, np.int32(opened.step)))
        chosen = _choose(found, keys)
        call_each(hooks, "after_run", context, SessionRunValues({}))
        plain = jax.tree.map(np.asarray, chosen)
        if yields_rows:
            rows = count_rows(features)
            _check_rows(plain, rows)
            for row in range(rows):
                yield jax.tree.map(lambda x, row=row: x[row], plain)
        else:
            yield plain
        if context.should_stop():
            break
    call_each(hooks, "end", context.session)


@called("Estimator.predict")
def _choose(predictions: Any, keys: Sequence[str] | None) -> Any:
    if keys is None:
        return predictions
    if not isinstance(predictions, Mapping):
        raise refuse(
            f"predict_keys={show(keys)}, and model_fn returned predictions={show(predictions)}.",
            "Only a dict has keys.",
            "Leave predict_keys out.",
        )
    missing = [key for key in keys if key not in predictions]
    if missing:
        raise refuse(
            f"predict_keys={show(keys)}, and model_fn has no predictions {missing[0]!r}.",
            f"The predictions are {', '.join(predictions)}.",
            "Pass some of these.",
        )
    return {key: predictions[key] for key in keys}


def _check_rows(predictions: Any, rows: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(predictions):
        if leaf.shape[:1] != (rows,):
            raise ShapeError(
                f"Estimator.predict: the prediction {jax.tree_util.keystr(path) or 'of model_fn'} "
                f"has the shape {list(leaf.shape)}, for a batch of {rows} row(s).\n\n"
                "Each prediction has one row for each row of the batch.\n\n"
                "Pass yield_single_examples=False, which yields batches."
            )
