"""`Model`: a Flax NNX module with `compile`, `fit`, `evaluate` and `predict`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

from jaxdist._buckets import Place
from jaxdist._called import called, refuse
from jaxdist._processes import get_current_process
from jaxdist._strategies import Strategy, get_strategy, has_strategy
from jaxdist._update import is_average_shown, keeps_average
from jaxdist._validate import as_flag, as_integer, as_number, check_instance
from jaxdist._weights import Mapped, export_weights, fetch_weight, list_weights, load_weights
from jaxdist.errors import ContextError
from jaxdist.fit._callbacks.base import Callback
from jaxdist.fit._compiled import (
    Compiled,
    EvaluateStep,
    PredictStep,
    find_dtype,
    get_rate,
    make_optimizer,
    make_predict_step,
    make_runner,
    make_transformation,
    set_rate,
)
from jaxdist.fit._history import History, Summary, summarize
from jaxdist.fit._loop import evaluation, resuming, training
from jaxdist.fit._stages import check_no_stages
from jaxdist.fit._step.find_metrics import find_output_metrics
from jaxdist.fit._step.loss_scale import ScaledOptimizer, find_loss_scale
from jaxdist.fit._step.losses import CALLER
from jaxdist.fit._step.output_losses import find_losses
from jaxdist.fit._step.steps import Steps

Verbose = str | int  # "auto", 0, 1 or 2

_LOG = logging.getLogger("jaxdist")


class Model:
    """A Flax NNX module that is trained on all replicas of a strategy.

    All arguments have the names and meanings of Keras. Every number that is printed or
    returned counts each example exactly once, with its weight, for any number of examples and
    replicas.

    Args:
        module: A Flax NNX module. `module(x)` returns predictions; if its `__call__` has an
            argument `training`, `train` or `deterministic`, it is passed. Dropout and BatchNorm
            of NNX are set for training and for evaluation even without one.
        strategy: The strategy; None for the current one. Outside of every scope that is the
            default strategy, which has one device; this is logged if JAX has more.

    Raises:
        ArgumentTypeError: `module` is not an NNX module.
        UnsupportedError: Its layers are on the stages of a pipeline (`partition.Stage`).

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     model = fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        ...     model.compile(optimizer=optax.sgd(0.3), loss="mse", metrics=["mae"])
        >>> x = np.random.default_rng(0).uniform(size=(100, 2)).astype("float32")
        >>> history = model.fit(x, x @ [[1.0], [2.0]], batch_size=32, epochs=30, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True

    Source:
        `keras.Model`.
    """

    @called("fit.Model")
    def __init__(self, module: nnx.Module, strategy: Strategy | None = None) -> None:
        remedy = "Pass for instance fit.Model(nnx.Linear(2, 1, rngs=...))."
        check_instance("module", module, nnx.Module, "a Flax NNX module", remedy)
        if strategy is not None:
            remedy = "Pass jaxdist.MirroredStrategy(), or None."
            check_instance("strategy", strategy, Strategy, "a strategy", remedy)
        if strategy is None and not has_strategy():
            _log_one_device()
        self.module = module
        self.strategy: Strategy = get_strategy() if strategy is None else strategy
        check_no_stages(module, self.strategy.layout)
        self.history = History()
        self.stop_training = False
        # Whether `fit` runs. It trains with the optimizer and the steps of one `compile`.
        self._is_fitting = False
        # How many passes over the data are done: each has its own order of examples.
        self._passes = 0
        # After how many epochs the current `fit` evaluates; None without validation.
        self._validates_every: int | None = None
        # Whether its validations use the average of the parameters.
        self._validates_average = False
        self._compiled: Compiled | None = None
        self._predict_step: PredictStep | None = None

    @called(CALLER)
    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = (),
        weighted_metrics: Any = (),
        *,
        loss_weights: Any = None,
        steps_per_execution: int = 1,
        mixed_precision: str | None = None,
        loss_scale: DynamicScale | None = None,
        gradient_accumulation_steps: int | None = None,
        find_nonfinite: bool = False,
    ) -> None:
        """Set the loss, optimizer and metrics. The state of the optimizer starts anew.

        Args:
            optimizer: A transformation of optax, or "sgd", "adam", "adamw", "rmsprop" or
                "adagrad" with the defaults of Keras. Adam of optax adds epsilon after the bias
                correction, and Keras before it.
            loss: A function that returns one value for each example, `[b]` or `[b, ...]`:
                `(y_true, y_pred)`, or one of optax, which takes predictions first. Or "mse",
                "mae", "huber", "log_cosh". For a model that returns a dict, a list or a tuple:
                the same structure of losses, with None for outputs without a loss. The targets `y`
                then have the same keys, the loss is the sum, and the logs have the loss of each
                output, such as "a_loss".
            metrics: A list of names, functions like `loss`, or `fit.Metric`s. Each example counts
                once. With losses by output, a dict or list of such lists.
            weighted_metrics: The same. Each example counts with its weight.
            loss_weights: Factors of the losses of the outputs in the sum.
            steps_per_execution: How many steps are one dispatch. Has no effect with parameter
                servers, where each step is a function of its own; this is logged.
            mixed_precision: "bfloat16" or "bf16": layers compute in bfloat16, and parameters,
                losses and statistics stay in float32. "float16": likewise, with a loss scale. A
                step whose gradients are not finite changes nothing on any replica.
            loss_scale: The first loss scale of float16, and the rule by which it changes. It
                multiplies the loss of each example. The default begins with 4096, and ends at 1.
            gradient_accumulation_steps: Update the parameters after this many steps, with the mean
                of their gradients (`optax.MultiSteps`).
            find_nonfinite: Keep the state before each step. If a loss is not finite, the model is
                set back to it, and the error names the first layer whose output is not finite.

        Raises:
            ArgumentError: A name is unknown, or means probabilities in Keras.
            ArgumentTypeError: An argument is of the wrong type.
            ContextError: A `fit` of this model runs.
            UnsupportedError: `mixed_precision="float16"` with parameter servers, or a module whose
                layers are on the stages of a pipeline.
        """
        self._check_is_not_fitting("compile")
        check_no_stages(self.module, self.strategy.layout)
        losses = find_losses(loss, loss_weights)
        plain = find_output_metrics("metrics", metrics, loss)
        weighted = find_output_metrics("weighted_metrics", weighted_metrics, loss)
        count = as_integer("steps_per_execution", steps_per_execution, least=1)
        is_looking = as_flag("find_nonfinite", find_nonfinite)
        if is_looking and count > 1:
            raise refuse(
                f"find_nonfinite=True and steps_per_execution={count}.",
                "find_nonfinite looks at the model between two steps, and these are one dispatch.",
                "Pass steps_per_execution=1 while you look.",
            )
        transform = make_transformation(optimizer, gradient_accumulation_steps)
        dtype = find_dtype(mixed_precision)
        scale = find_loss_scale(loss_scale, dtype, self.strategy, self.module)
        steps = Steps(self.module, losses, plain, weighted, dtype)
        with self.strategy.scope():
            made = make_optimizer(self.module, transform, scale)
        runner = make_runner(self.strategy, steps, keeps_state=is_looking)
        self._compiled = Compiled(
            made, steps, runner, count, is_looking, EvaluateStep(steps), PredictStep(steps)
        )

    def get_compiled(self, method: str) -> Compiled:
        """Return the result of `compile`, for a method of the model.

        Raises:
            ContextError: `compile` has not been called.
        """
        if self._compiled is None:
            raise ContextError(
                f"fit.Model.{method} was called before compile.\n\n"
                "compile sets the optimizer and the loss.\n\n"
                "Call model.compile(optimizer=optax.adam(1e-3), loss='mse') first."
            )
        return self._compiled

    def _check_has_parameters(self, method: str) -> None:
        """Check that the module has its parameters, and not their average.

        Raises:
            ContextError: This is called in a block of `training.use_average`.
        """
        if self._compiled is not None and is_average_shown(self._compiled.optimizer):
            raise ContextError(
                f"fit.Model.{method} was called in a block of training.use_average.\n\n"
                "There the module has the average, and the optimizer keeps the parameters.\n\n"
                "Call it outside of the block. In it, evaluate, predict or call export_weights."
            )

    def _check_is_not_fitting(self, method: str) -> None:
        """Check that no `fit` of this model runs.

        Raises:
            ContextError: One does, so a callback called the method.
        """
        if self._is_fitting:
            raise ContextError(
                f"fit.Model.{method} was called while its fit runs, such as in a callback.\n\n"
                "A fit trains with one optimizer, one loss and one history from its first epoch to "
                "its last.\n\n"
                "Call fit with fewer epochs, then "
                f"{method}, and then fit(initial_epoch=...). A callback may set "
                "model.learning_rate and call train_on_batch, evaluate and predict."
            )

    def objects(self) -> dict[str, Any]:
        """Return the objects that a checkpoint saves: the module and its optimizer."""
        if self._compiled is None:
            return {"module": self.module}
        return {"module": self.module, "optimizer": self._compiled.optimizer}

    def _explained_objects(self) -> dict[str, Any]:
        """Return the NNX objects that `explain` shows, by the prefixes of their paths."""
        if self._compiled is None:
            return {"": self.module}
        return {"": self.module, "optimizer": self._compiled.optimizer}

    @property
    def writes_logs(self) -> bool:
        """Whether this process shows progress and writes logs: one process of a job does."""
        return bool(self.strategy.extended.should_save_summary)

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this process takes part in writing checkpoints.

        Processes that share arrays write them together. Among workers with parameter servers,
        the chief writes.
        """
        is_shared = self.strategy.layout.is_shared
        return is_shared or bool(self.strategy.extended.should_checkpoint)

    def get_predict_step(self) -> PredictStep:
        """Return the step of `predict`, which needs no `compile`."""
        if self._compiled is not None:
            return self._compiled.predict_step
        if self._predict_step is None:
            self._predict_step = make_predict_step(self.module)
        return self._predict_step

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Sequence[Callback] = (),
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int | None = None,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        *,
        seed: int = 0,
    ) -> History:
        """Train the model.

        Shapes:
            In: every leaf of `x` and `y` is `[N, ...]`. A global batch is `[batch_size, ...]`; the
            last one of an epoch has the remaining examples.

        Cost:
            One all-reduce of the gradients and a few sums in each step. Losses are fetched some
            steps later, so no step waits for them.

        Guarantees:
            The gradient of a step is that of the sum of weighted losses over the global batch,
            divided by its number of examples, for any number of replicas. The loss of an epoch is
            the same mean over all its examples. Ctrl-C takes effect between two steps, and `fit`
            can be called again.

        Args:
            x: An array, a dict of arrays, or a tuple of arrays, which are the arguments of the
                module; or a dataset whose batches are `(x, y)` or `(x, y, sample_weight)`.
            y: The targets; not with a dataset.
            batch_size: The size of a global batch, 32 by default; not with a dataset.
            epochs: The number of the last epoch. A resumed training trains the remaining ones.
            verbose: 1 shows a bar, 2 prints a line for each epoch, 0 nothing; "auto" is 1 on a
                terminal and in a notebook, and otherwise 2.
            callbacks: Callbacks, in the order in which they are called.
            validation_split: The fraction of the examples, at the end, that is held out. Not used
                with `validation_data`.
            validation_data: `(x, y)`, `(x, y, sample_weight)` or a dataset, evaluated after an
                epoch.
            shuffle: Whether each epoch has its own order of examples; not with a dataset.
            class_weight: A weight for each class. The default is 1.
            sample_weight: A weight for each example, `[N]`, or for each value of the loss.
            initial_epoch: The number of epochs that are already done; None for 0, or for the epochs
                that `ModelCheckpoint(resume=True)` continues after.
            steps_per_epoch: The number of batches of an epoch; required for endless data.
            validation_steps: How many batches of the validation to read.
            validation_batch_size: The batch size of validation; `batch_size` by default.
            validation_freq: Evaluate after every n-th epoch.
            seed: The seed of the orders of examples.

        Returns:
            The history, which is also `model.history`.

        Raises:
            ContextError: `compile` has not been called, or another `fit` of this model runs.
            ShapeError: Arrays have different numbers of examples (all are listed), or none; or a
                loss does not have a value for each example.
            NonFiniteLossError: A loss is not finite. The error names the step and its examples.
        """
        return training.fit(
            self,
            training.FitArguments(
                x=x,
                y=y,
                batch_size=batch_size,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_split=validation_split,
                validation_data=validation_data,
                shuffle=shuffle,
                class_weight=class_weight,
                sample_weight=sample_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
                seed=seed,
            ),
        )

    @called("fit.Model.evaluate")
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over all examples; each counts exactly once.

        Args:
            x: As for `fit`.
            y: As for `fit`.
            batch_size: As for `fit`.
            verbose: 0 prints nothing; "auto", 1 and 2 print the result.
            sample_weight: As for `fit`.
            steps: How many batches to read; None for all.
            callbacks: Callbacks whose `on_test_` methods are called.
            return_dict: Whether to return a dict.

        Returns:
            The loss, or a list with the loss and the metrics, or a dict, as Keras does.

        Raises:
            ContextError: `compile` has not been called.
            ShapeError: As for `fit`, or there are no examples.
        """
        as_dict = as_flag("return_dict", return_dict)
        data = (x, y, sample_weight)
        logs = evaluation.evaluate(self, data, batch_size, steps, verbose, callbacks)
        return _choose_result(logs, as_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Any:
        """Return the outputs of the module for all examples, in their order.

        Args:
            x: As for `fit`; a dataset may have batches `(x, y)`, whose `y` is ignored.
            batch_size: As for `fit`.
            verbose: Accepted as in Keras, and ignored: `predict` shows nothing.
            steps: How many batches to read; None for all.
            callbacks: Callbacks whose `on_predict_` methods are called.

        Returns:
            NumPy arrays `[N, ...]`, in the structure that the module returns.

        Raises:
            ShapeError: As for `fit`, or there are no examples.
        """
        return evaluation.predict(self, x, batch_size, steps, verbose, callbacks)

    @called("fit.Model.train_on_batch")
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Train on one global batch, and return its loss and metrics.

        Args:
            x: As for `fit`, without datasets.
            y: As for `fit`.
            sample_weight: As for `fit`.
            class_weight: As for `fit`.
            return_dict: As for `evaluate`.

        Returns:
            As for `evaluate`.
        """
        as_dict = as_flag("return_dict", return_dict)
        logs = training.train_on_batch(self, x, y, sample_weight, class_weight)
        return _choose_result(logs, as_dict)

    @called("fit.Model.test_on_batch", replaces="fit.Model.evaluate")
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Return the loss and the metrics of one global batch, as `evaluate` does."""
        batch_size = training.count_examples("test_on_batch", x, y, sample_weight)
        return self.evaluate(
            x, y, batch_size, verbose=0, sample_weight=sample_weight, return_dict=return_dict
        )

    @called("fit.Model.predict_on_batch", replaces="fit.Model.predict")
    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one global batch, as `predict` does."""
        batch_size = training.count_examples("predict_on_batch", x, None, None)
        return self.predict(x, batch_size, verbose=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, as it is, on one device."""
        return self.module(*args, **kwargs)

    @property
    def optimizer(self) -> "nnx.Optimizer[Any]":
        """The optimizer that `compile` made."""
        return self.get_compiled("optimizer").optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate. Assign to it to change the rate of the next steps.

        Raises:
            ArgumentError: The learning rate is not in the optimizer's state.
        """
        return get_rate(self.optimizer)

    @learning_rate.setter
    @called("fit.Model")
    def learning_rate(self, rate: float) -> None:
        set_rate(self.optimizer, as_number("learning_rate", rate, least=0.0))

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without `mixed_precision="float16"`."""
        optimizer = self.optimizer
        if not isinstance(optimizer, ScaledOptimizer):
            return None
        return float(jax.device_get(optimizer.scale[...]))

    def summary(self) -> Summary:
        """Return a table of layers: shapes, parameters, shardings, and bytes per device."""
        return summarize(self.module, self._compiled)

    def save(self, directory: str | Place) -> None:
        """Save the parameters, all other state of the module, and the optimizer.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        resuming.save(self, directory)

    def load(self, directory: str | Place) -> None:
        """Load a saved model into this one, on any number of devices.

        Raises:
            CheckpointError: The directory has no model, or another one. Nothing changes then.
        """
        resuming.load(self, directory)

    @overload
    def get_weights(self, by_name: Literal[False] = False) -> list[np.ndarray]: ...
    @overload
    def get_weights(self, by_name: Literal[True]) -> dict[str, np.ndarray]: ...
    @called("fit.Model.get_weights")
    def get_weights(self, by_name: bool = False) -> list[np.ndarray] | dict[str, np.ndarray]:
        """Return copies of all parameters, statistics and variables of your own classes.

        Args:
            by_name: Whether to return a dict by path, such as `layers/0/kernel`. Otherwise a list
                in the order of `nnx.state`.
        """
        if not as_flag("by_name", by_name):
            return resuming.get_weights(self.module)
        return {weight.path: fetch_weight(weight) for weight in list_weights(self.module)[0]}

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set all parameters, statistics and own variables, in the order of `get_weights`.

        Raises:
            ShapeError: The number of arrays or a shape differs; all differences are listed.
        """
        resuming.set_weights(self.module, weights)

    @called("fit.Model.export_weights", replaces="training.export_weights")
    def export_weights(
        self,
        path: str | Place,
        mapping: Mapped | None = None,
        *,
        like: str | Place | None = None,
        ignore: Sequence[str] = (),
        max_shard_size: int = 5_000_000_000,
    ) -> None:
        """Write the weights as safetensors, by name, as `training.export_weights`."""
        export_weights(
            self.module, path, mapping, like=like, ignore=ignore, max_shard_size=max_shard_size
        )

    @called("fit.Model.load_weights", replaces="training.load_weights")
    def load_weights(
        self, path: str | Place, mapping: Mapped | None = None, *, ignore: Sequence[str] = ()
    ) -> None:
        """Load weights of safetensors by name, as `training.load_weights`.

        The optimizer stays as it is. Load before `compile` if it keeps an average
        (`training.moving_average`), which begins with the parameters of that moment.
        """
        load_weights(self.module, path, mapping, ignore=ignore)
        if self._compiled is not None and keeps_average(self._compiled.optimizer):
            _LOG.warning(
                "fit.Model.load_weights: the average of the optimizer still has the parameters of "
                "compile. Load weights before compile, so that the average begins with them."
            )

    def __repr__(self) -> str:
        count = self.strategy.num_replicas_in_sync
        return f"fit.Model({type(self.module).__name__}, {count} replica(s))"


def _choose_result(logs: dict[str, float], as_dict: bool) -> Any:
    """Return the loss, or a list with the loss and the metrics, or a dict, as Keras does."""
    if as_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


def _log_one_device() -> None:
    """Log that a model without a strategy uses only one of several devices."""
    count = jax.device_count()
    # Log once per job: its processes run the same program.
    if count > 1 and get_current_process().index == 0:
        _LOG.warning(
            "fit.Model was made outside of strategy.scope(), and given no strategy: it trains on "
            "one of %d devices. To use all, create module and model in the scope of a strategy, or "
            "pass one: fit.Model(module, jaxdist.MirroredStrategy()). For one device on purpose: "
            "fit.Model(module, jaxdist.OneDeviceStrategy(jax.devices()[0]))",
            count,
        )
