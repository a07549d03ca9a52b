"""`Estimator`: trains, evaluates, predicts and exports a model that lives in a folder."""

import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxdist import data
from jaxdist._buckets import as_address, as_place
from jaxdist._called import call_as, called, name_call, refuse
from jaxdist._strategies import Strategy, get_strategy, has_strategy
from jaxdist._validate import (
    as_flag,
    as_integer,
    as_list,
    check_instance,
    check_text,
    show,
)
from jaxdist.errors import ContextError, JaxdistError, ShapeError, UnsupportedError
from jaxdist.estimator._export import check_features, write_export
from jaxdist.estimator._hooks import CheckpointSaverListener, SessionRunHook, call_each, check_hooks
from jaxdist.estimator._model.building import Built, build
from jaxdist.estimator._model.model_fn import (
    make_input_fn,
    make_model_fn,
    open_input,
    split_batch,
    take_local,
)
from jaxdist.estimator._model.spec import ModeKeys
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._running.evaluate import Opened, run_evaluation, run_prediction
from jaxdist.estimator._running.folder import (
    CheckpointChoice,
    ModelFolder,
    find_checkpoint,
    read_settings,
)
from jaxdist.estimator._running.progress import write_summary
from jaxdist.estimator._running.train import Training, count_processes, run_training
from jaxdist.estimator._specs import check_name

_LOG = logging.getLogger("jaxdist")
_CALLER = "estimator.Estimator"


class Estimator:
    """A model in a folder: each call reads its newest checkpoint, and `train` adds new ones.

    Shapes:
        Each element of the dataset of an `input_fn` is the batch of one replica: `[b, ...]`, in a
        pair `(features, labels)` or as features alone. A step of `R` replicas takes `R` of them.

    Cost:
        Each `train` traces and compiles its step again. `evaluate` and `predict` compile at their
        first call, and for other shapes.

    Guarantees:
        An evaluation counts each row once, for any number of replicas and any batch size.
        After an error, also in a hook, the newest checkpoint is complete, and `train` continues
        from it.

    Args:
        model_fn: A function `(features, labels, mode, params, config)` that returns an
            `EstimatorSpec`; it may leave out all but `features`. It runs in a replica, and gets
            its modules by `get_module`. Or a Flax NNX module, or a Keras model, with `loss` and
            `optimizer`; or a compiled Keras model. The object itself does not change: the trained
            values are in the folder.
        model_dir: The folder, also `gs://BUCKET/FOLDER` or `s3://BUCKET/FOLDER`; None for that of
            `config`, or else a temporary one.
        config: How the model is trained and saved; None for `RunConfig()`.
        params: Passed to `model_fn` and `input_fn`.
        warm_start_from: The folder of another model, or `WarmStartSettings`: a new model begins
            with its values.
        loss: For a module or Keras model: `loss(predictions, labels)`, one value for each row or a
            scalar.
        optimizer: For a module or Keras model: an optax transformation.
        metrics: For a module or Keras model: functions `(predictions, labels)` by name, one value
            for each row.

    Raises:
        ArgumentError: The arguments do not fit together.
        ArgumentTypeError: An argument is of the wrong type.
        UnsupportedError: A Keras model uses another backend, or its optimizer scales the loss or
            averages weights.

    Example:
        >>> import tempfile
        >>> estimator = jaxdist.estimator.Estimator(
        ...     nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp(),
        ...     loss=lambda y, wanted: ((y - wanted) ** 2)[:, 0], optimizer=optax.sgd(0.1))
        >>> x = np.ones((4, 2), "float32")
        >>> def input_fn():
        ...     return [(x, x[:, :1])] * 20
        >>> estimator.train(input_fn).evaluate(input_fn)["global_step"]
        20

    Source:
        `tf.estimator.Estimator`, `tensorflow_estimator` 1.15.
    """

    @called(_CALLER)
    def __init__(
        self,
        model_fn: Any,
        model_dir: Any = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: Any = None,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: optax.GradientTransformation | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    ) -> None:
        if params is not None:
            remedy = "Pass for instance params={'hidden': 16}."
            check_instance("params", params, Mapping, "a dict", remedy)
        self._model_fn = make_model_fn(model_fn, params, loss, optimizer, metrics)
        if config is not None:
            remedy = "Pass jaxdist.estimator.RunConfig(...)."
            check_instance("config", config, RunConfig, "a RunConfig", remedy)
        config = RunConfig() if config is None else config
        self._folder = _find_folder(model_dir, config)
        self._config = config.move_to(str(self._folder.path))
        self._params = None if params is None else dict(params)
        self._warm_start = read_settings(warm_start_from)
        # Evaluations and predictions are built once, and get the values of each checkpoint.
        self._built: dict[str, Built] = {}

    @property
    def model_dir(self) -> str:
        """The folder of the model."""
        return str(self._folder.path)

    @property
    def config(self) -> RunConfig:
        """How the model is trained, saved and evaluated."""
        return self._config

    @property
    def params(self) -> dict[str, Any] | None:
        """The params that `model_fn` and `input_fn` get."""
        return None if self._params is None else dict(self._params)

    @called("Estimator.train")
    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> "Estimator":
        """Train until the data ends, or for a number of steps, and save the last step.

        Args:
            input_fn: Returns the dataset of this worker. It may take `mode`, `params`, `config` and
                `input_context`, by these names.
            hooks: Hooks of this worker.
            steps: How many steps this worker takes.
            max_steps: The global step at which to end; the steps of all workers count. Workers
                that are not in step may each take one or two steps more.
            saving_listeners: Objects that are called around each checkpoint.

        Returns:
            This estimator.

        Raises:
            ArgumentError: Both `steps` and `max_steps` are given, or one is less than 1.
            ShapeError: The dataset does not have a batch for each replica.
            NonFiniteLossError: The loss is not finite.
            ContextError: The call is in the scope of a strategy.

        Source:
            `tf.estimator.Estimator.train`.
        """
        caller = "Estimator.train"
        chain = check_hooks("hooks", hooks)
        listeners = check_hooks("saving_listeners", saving_listeners, CheckpointSaverListener)
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None:
                as_integer(name, value, least=1)
        if steps is not None and max_steps is not None:
            raise refuse(
                f"steps={steps} and max_steps={max_steps}.",
                "steps counts the steps of this call, and max_steps those of all calls.",
                "Pass one of the two.",
            )
        read = self._make_input(input_fn, ModeKeys.TRAIN)
        strategy = self._find_strategy(self._config.train_distribute)
        latest = self._folder.find_latest()
        if max_steps is not None and latest is not None and latest.step >= max_steps:
            _LOG.info("%s: step %d of %d is reached.", caller, latest.step, max_steps)
            return self
        call, config, settings = self._make_call(ModeKeys.TRAIN), self._config, self._warm_start
        training = Training(
            call, strategy, read, self._folder, config, chain, listeners, steps, max_steps, settings
        )
        run_training(training)
        return self

    @called("Estimator.evaluate")
    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: Any = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the loss and the metrics of a checkpoint, as means over all rows.

        It runs on `config.eval_distribute`, or on one device.

        Args:
            input_fn: Returns the dataset; see `train`.
            steps: How many batches to read; None for all.
            hooks: Hooks of this evaluation.
            checkpoint_path: A checkpoint; None for the newest.
            name: The name of the evaluation: the summary is in `MODEL_DIR/eval_NAME`.

        Returns:
            `{"loss": ..., "global_step": ..., metric: ...}`.

        Raises:
            CheckpointError: There is no checkpoint, or it is of another model.
            ShapeError: The dataset has no rows.
            ContextError: The call is in the scope of a strategy.
            UnsupportedError: `config.eval_distribute` spans several processes.

        Source:
            `tf.estimator.Estimator.evaluate`.
        """
        chain = check_hooks("hooks", hooks)
        if steps is not None:
            as_integer("steps", steps, least=1)
        # A number above sys.maxsize means all batches, too.
        most = None if steps is None else min(steps, sys.maxsize)
        check_name(name)
        read = self._make_input(input_fn, ModeKeys.EVAL)
        strategy = self._find_strategy(self._config.eval_distribute)
        if count_processes(strategy) > 1:
            raise UnsupportedError(
                f"{name_call()} was called with config.eval_distribute over "
                f"{count_processes(strategy)} processes.\n\n"
                "An evaluation runs in one process, usually that of the job 'evaluator'.\n\n"
                "Leave eval_distribute out, or pass a jaxdist.MirroredStrategy()."
            )
        choice = self._choose(checkpoint_path)
        opened = self._open(ModeKeys.EVAL, strategy, choice, read, chain)
        result: dict[str, Any] = run_evaluation(opened, most)
        result["global_step"] = opened.step
        folder = self._folder.path / (f"eval_{name}" if name else "eval")
        write_summary(folder, opened.step, {n: v for n, v in result.items() if n != "global_step"})
        return result

    @called("Estimator.predict")
    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: Any = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of a checkpoint, on one device.

        Args:
            input_fn: Returns the dataset. Labels, if it has any, are ignored.
            predict_keys: The names of the predictions; None for all.
            hooks: Hooks of this prediction.
            checkpoint_path: A checkpoint; None for the newest.
            yield_single_examples: Whether to yield rows; False for batches.

        Yields:
            A prediction, as NumPy arrays in the structure of `EstimatorSpec.predictions`.

        Raises:
            CheckpointError: There is no checkpoint, or it is of another model.
            ArgumentError: A key is not among the predictions.
            ContextError: The call is in the scope of a strategy.

        Source:
            `tf.estimator.Estimator.predict`.
        """
        given = check_hooks("hooks", hooks)
        as_flag("yield_single_examples", yield_single_examples)
        if predict_keys is not None:
            remedy = "Pass for instance predict_keys=['logits']."
            as_list("predict_keys", predict_keys, "a list of names", remedy, kind=str)
        read = self._make_input(input_fn, ModeKeys.PREDICT)
        strategy = self._find_strategy(None)
        choice = self._choose(checkpoint_path)

        # The call itself makes the checks above, rather than the first `next`.
        @called("Estimator.predict")
        def generate() -> Iterator[Any]:
            opened = self._open(ModeKeys.PREDICT, strategy, choice, read, given)
            yield from run_prediction(opened, predict_keys, yields_rows=yield_single_examples)

        return generate()

    @called("Estimator.export")
    def export(
        self,
        export_dir_base: Any,
        features: Any,
        checkpoint_path: Any = None,
        *,
        any_batch: bool = True,
    ) -> str:
        """Write the model as one program and its weights, and return the path.

        The folder is named after the time, and has `predict.bin` (StableHLO, by `jax.export`),
        `weights` (an Orbax checkpoint) and `export.json`. `load_export` reads it.

        Args:
            export_dir_base: The folder of exports, which may be in a bucket.
            features: Example features, or `jax.ShapeDtypeStruct`s: their shapes and dtypes count.
            checkpoint_path: A checkpoint; None for the newest.
            any_batch: Whether the program takes any number of rows; False for that of `features`.

        Raises:
            CheckpointError: There is no checkpoint, or it is of another model.
            MissingExtraError: flatbuffers is not installed.
            ContextError: The call is in the scope of a strategy.

        Source:
            `tf.estimator.Estimator.export_saved_model`.
        """
        base = as_place("export_dir_base", export_dir_base, "runs/a/export")
        any_batch = as_flag("any_batch", any_batch)
        check_features(features, any_batch=any_batch)
        strategy = self._find_strategy(None)
        choice = self._choose(checkpoint_path)
        try:
            built, choice = self._build(ModeKeys.PREDICT, strategy, features, choice)
            return str(write_export(built, features, base, choice.step, any_batch=any_batch))
        except (TypeError, ValueError) as error:
            if isinstance(error, JaxdistError):
                raise
            raise refuse(
                f"features={show(features)}, and the model raised {type(error).__name__}: "
                f"{str(error).splitlines()[0]}.",
                "The model is traced with features of these shapes and dtypes, and, with "
                "any_batch, of any number of rows.",
                "Pass features like those of input_fn, or any_batch=False.",
            ) from error

    # What is in the folder

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint; None if there is none.

        Source:
            `tf.estimator.Estimator.latest_checkpoint`.
        """
        latest = self._folder.find_latest()
        return None if latest is None else str(latest.path)

    @called("Estimator.get_variable_names")
    def get_variable_names(self) -> list[str]:
        """Return the names of the arrays in the newest checkpoint.

        Raises:
            CheckpointError: There is no checkpoint.

        Source:
            `tf.estimator.Estimator.get_variable_names`.
        """
        choice = self._choose(None)
        return sorted(choice.follow(lambda found: found.read_leaves())[1])

    @called("Estimator.get_variable_value")
    def get_variable_value(self, name: str) -> Any:
        """Return an array of the newest checkpoint.

        Args:
            name: One of `get_variable_names()`, such as `modules.model.kernel`.

        Raises:
            CheckpointError: There is no checkpoint, or it has no such array.

        Source:
            `tf.estimator.Estimator.get_variable_value`.
        """
        check_text("name", name, "modules.model.kernel")
        choice = self._choose(None)
        return choice.follow(lambda found: found.read(name))[1]

    @called("Estimator.eval_dir")
    def eval_dir(self, name: str | None = None) -> str:
        """Return the folder of the summaries of evaluations.

        Args:
            name: The name of the evaluation.

        Source:
            `tf.estimator.Estimator.eval_dir`.
        """
        check_name(name)
        return str(self._folder.path / (f"eval_{name}" if name else "eval"))

    # Parts of the calls above

    def _make_input(self, input_fn: Any, mode: str) -> Callable[[Any], Any]:
        return make_input_fn(input_fn, mode=mode, params=self._params, config=self._config)

    def _make_call(self, mode: str) -> Callable[[Any, Any], Any]:
        params: dict[str, Any] = self._params or {}
        return lambda features, labels: self._model_fn(features, labels, mode, params, self._config)

    def _find_strategy(self, given: Strategy | None) -> Strategy:
        if has_strategy():
            raise ContextError(
                f"{name_call()} was called in the scope of a strategy.\n\n"
                "An estimator enters the scope of its own strategy.\n\n"
                "Pass the strategy to RunConfig(train_distribute=strategy), and call it outside."
            )
        return get_strategy() if given is None else given

    def _choose(self, path: Any) -> CheckpointChoice:
        if path is not None:
            path = as_address("checkpoint_path", path, "runs/a/checkpoints/100")
            return call_as(
                f"{name_call()} was given checkpoint_path={path!r}, and", find_checkpoint, path
            )
        return find_checkpoint(self._folder.path)

    def _open(
        self,
        mode: str,
        strategy: Strategy,
        choice: CheckpointChoice,
        read: Callable[[Any], Any],
        hooks: Sequence[SessionRunHook],
    ) -> Opened:
        """Begin an evaluation or a prediction; return its model and batches."""
        call_each(hooks, "begin")
        batches = _open_elements(read)
        first = next(batches, None)
        if first is None:
            raise refuse(
                "input_fn, whose dataset has no element.",
                "Each element of the dataset is a batch.",
                "Let input_fn return a dataset with at least one batch.",
                kind=ShapeError,
            )
        built, choice = self._build(mode, strategy, first, choice)
        spec = built.spec
        own = spec.evaluation_hooks if mode == ModeKeys.EVAL else spec.prediction_hooks
        call_each(own or (), "begin")
        all_batches = itertools.chain([first], batches)
        return Opened(built, choice.step, all_batches, [*hooks, *(own or ())])

    def _build(
        self, mode: str, strategy: Strategy, element: Any, choice: CheckpointChoice
    ) -> tuple[Built, CheckpointChoice]:
        """Return the model with the values of a checkpoint, and the checkpoint that was read."""
        built = self._built.get(mode)
        if built is None:
            features, labels = split_batch(take_local(strategy, element))
            labels = None if mode == ModeKeys.PREDICT else labels
            seed = self._config.tf_random_seed or 0
            built = build(self._make_call(mode), mode, strategy, features, labels, seed)
        choice, _ = choice.follow(lambda found: found.restore(built.state))
        self._built[mode] = built
        return built, choice


def _find_folder(given: Any, config: RunConfig) -> ModelFolder:
    folder = None if given is None else as_address("model_dir", given, "runs/a")
    if folder is not None and config.model_dir not in (None, folder):
        raise refuse(
            f"model_dir={show(folder)}, and config.model_dir is {config.model_dir!r}.",
            "A model has one folder.",
            "Pass it in one of the two places.",
        )
    folder = folder or config.model_dir
    if folder is None:
        folder = tempfile.mkdtemp(prefix="jaxdist-")
        _LOG.warning("%s was given no model_dir, and uses %s.", _CALLER, folder)
    keep = config.keep_checkpoint_max
    place = as_place("model_dir", folder, "runs/a")
    return ModelFolder(place, keep, config.keep_checkpoint_every_n_hours)


def _open_elements(read: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the batches of an input function, one after another."""
    options = data.InputOptions(experimental_fetch_to_device=False)
    with open_input(get_strategy(), read, options) as batches:
        yield from batches
