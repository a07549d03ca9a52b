"""`SwapEMAWeights`: evaluations with the average of the parameters."""

import contextlib
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._parameter_server import WorkerStrategy
from jaxdist._validate import as_flag
from jaxdist.errors import UnsupportedError
from jaxdist.fit._callbacks.base import Callback, Logs
from jaxdist.training import use_average


class SwapEMAWeights(Callback):
    """Evaluates and predicts with the moving average of the parameters.

    The optimizer keeps the average: `compile(optimizer=training.moving_average(...))`. In `fit`,
    validations use it, and so do values that begin with `val_`: `EarlyStopping` restores the
    average of its best epoch. In `evaluate` and `predict`, pass this callback as well. The training
    itself continues with the parameters, and `ModelCheckpoint` saves both. Statistics, such as
    those of BatchNorm, are not averaged.

    Cost:
        Nothing in the steps: model and average exchange their arrays for an evaluation.

    Args:
        overwrite_at_end: Whether the model gets the average at the end of `fit`, as optimizers of
            Keras with `use_ema=True` do.

    Raises:
        ArgumentError: The optimizer of the model keeps no average. Raised before training.
        UnsupportedError: The strategy is one of parameter servers of version 1.

    Example:
        >>> model = fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        >>> model.compile(training.moving_average(optax.sgd(0.1), decay=0.9), "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> history = model.fit(x, x[:, :1], validation_split=0.5, verbose=0,
        ...                     callbacks=[fit.SwapEMAWeights()])
        >>> averaged = model.evaluate(x, x[:, :1], verbose=0, callbacks=[fit.SwapEMAWeights()])
        >>> bool(np.isclose(averaged, history.history["val_loss"][-1]))
        True

    Source:
        `keras.callbacks.SwapEMAWeights`.
    """

    @called("fit.SwapEMAWeights")
    def __init__(self, overwrite_at_end: bool = False) -> None:
        self._overwrites = as_flag("overwrite_at_end", overwrite_at_end)

    @called("fit.SwapEMAWeights", replaces="training.use_average")
    def set_model(self, model: Any) -> None:
        if isinstance(model.strategy, WorkerStrategy):
            raise refuse(
                "a model whose strategy is a ParameterServerStrategy of version 1.",
                "Its workers share the parameters on the servers, and train while one of them "
                "evaluates, so none may put the average there.",
                "Evaluate in one process after the training, or train with ClusterCoordinator.",
                kind=UnsupportedError,
            )
        super().set_model(model)
        # Raise for an optimizer without an average now, not after the first epoch.
        with self._in_evaluation():
            pass

    def _in_evaluation(self) -> contextlib.AbstractContextManager[None]:
        return use_average(self.model.module, self.model.get_compiled("optimizer").optimizer)

    def on_train_end(self, logs: Logs) -> None:
        if self._overwrites:
            with self._in_evaluation():
                weights = self.model.get_weights()
            self.model.set_weights(weights)
