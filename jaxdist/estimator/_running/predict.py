"""The loop of `Estimator.predict`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._validate import show
from jaxdist.errors import ShapeError
from jaxdist.estimator._hooks import HookChain, Session, SessionRunHook, SessionRunValues
from jaxdist.estimator._model import Built, count_rows
from jaxdist.estimator._running.input import split_batch


def predict_batches(built: Built, features: Any, global_step: int) -> Any:
    """Return the predictions of a batch."""
    step = built.programs.get("predict")
    if step is None:
        step = built.programs["predict"] = _PredictStep(built)
    return built.strategy.run(step, (built.modules, features, np.int32(global_step)))


# An object, since each model has its own: a function that is made often is a mistake.
class _PredictStep:
    """A step that predicts."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def __call__(self, modules: Any, features: Any, global_step: Any) -> Any:
        return self._built.call_model(modules, features, None, lambda: global_step).predictions


def run_prediction(
    built: Built,
    elements: Iterator[Any],
    global_step: int,
    keys: Sequence[str] | None,
    hooks: Sequence[SessionRunHook],
    *,
    yields_rows: bool,
) -> Iterator[Any]:
    """Yield the predictions, row by row or batch by batch.

    Raises:
        ArgumentError: A key is not among the predictions.
        ShapeError: A prediction does not have a row for each row of the batch.
    """
    chain = HookChain(hooks)
    session = Session(built.modules, lambda: global_step)
    context = chain.open(session)
    for element in elements:
        features, _ = split_batch(element)
        chain.before_run(context)
        found = _choose(predict_batches(built, features, global_step), keys)
        chain.after_run(context, SessionRunValues({}))
        plain = jax.tree.map(np.asarray, found)
        if yields_rows:
            rows = count_rows(features)
            _check_rows(plain, rows)
            for row in range(rows):
                yield jax.tree.map(lambda x, row=row: x[row], plain)
        else:
            yield plain
        if context.should_stop():
            break
    chain.end(session)


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
