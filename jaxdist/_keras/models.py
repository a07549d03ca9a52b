"""Records the strategy of each Keras model, and the model that is called now."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat, _replica
from jaxdist._called import call_as, refuse
from jaxdist._checkpoints import Interrupts
from jaxdist._keras.source import keras_module
from jaxdist.data import Batches, DistributedDataset, DistributedIterator
from jaxdist.errors import MixedStrategyError, UnsupportedError

_STRATEGIES: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
_MODEL: ContextVar[Any] = ContextVar("jaxdist_keras_model", default=None)
_METHOD: ContextVar[str] = ContextVar("jaxdist_keras_method", default="")
_INTERRUPTS: ContextVar[Interrupts | None] = ContextVar("jaxdist_keras_interrupts", default=None)


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was made or compiled, or None."""
    return _STRATEGIES.get(model)


def name_of(model: Any) -> str:
    """Return the name of a model, or of its class while it is being made."""
    return str(getattr(model, "name", None) or type(model).__name__)


def remember_strategy(model: Any, what: str) -> None:
    """Record the strategy of the current scope as the strategy of the model.

    Args:
        model: The model.
        what: What happens to the model, for errors: "made" or "compiled".

    Raises:
        UnsupportedError: Keras uses another backend.
        MixedStrategyError: The model was made in the scope of another strategy.
    """
    frame = _replica.current_frame()
    if frame is None or frame.is_inside_step:
        return
    strategy, known = frame.strategy, _STRATEGIES.get(model)
    if known is strategy:
        return
    name = type(strategy).__name__
    if known is not None:
        raise MixedStrategyError(
            f"The Keras model {name_of(model)!r} was {what} in the scope of {strategy!r}.\n\n"
            f"It was made in the scope of {known!r}, and trains on its devices.\n\n"
            "Make and compile a model in the scope of one strategy."
        )
    _check_backend(model, what, name)
    _STRATEGIES[model] = strategy


def _check_backend(model: Any, what: str, name: str) -> None:
    config = keras_module("backend.config")
    if config.backend() != "jax":
        raise UnsupportedError(
            f"The Keras model {name_of(model)!r} was {what} in the scope of a {name}, and Keras "
            f"uses the backend {config.backend()!r}.\n\n"
            "Strategies of jaxdist train models of the JAX backend. Keras reads its backend once, "
            "when it is imported.\n\n"
            "Start the program with the environment variable KERAS_BACKEND=jax, or set "
            'os.environ["KERAS_BACKEND"] = "jax" before `import keras`.'
        )
    if config.is_nnx_enabled():
        raise UnsupportedError(
            f"The Keras model {name_of(model)!r} was {what} in the scope of a {name}, and Keras "
            "keeps its variables in Flax NNX (KERAS_NNX_ENABLED).\n\n"
            "The step of a strategy passes the variables of Keras as arrays.\n\n"
            "Start the program with KERAS_NNX_ENABLED=false."
        )


def forget_losses(model: Any) -> None:
    """Make the layers of a model forget the losses that they added in earlier calls.

    Keras identifies them by the `id` of arrays, and a new array may have the `id` of a deleted one.
    """
    for layer in model._flatten_layers():
        getattr(layer, "_loss_ids", set()).clear()


def check_call(model: Any, method: str) -> Any:
    """Return the strategy of a model that is called, or None.

    Raises:
        MixedStrategyError: The current scope has a strategy that is not the model's.
    """
    strategy, frame = strategy_of(model), _replica.current_frame()
    if frame is None or frame.strategy is strategy:
        return strategy
    made = "outside of every scope" if strategy is None else f"in the scope of {strategy!r}"
    raise MixedStrategyError(
        f"{method} of the Keras model {name_of(model)!r} was called in the scope of "
        f"{frame.strategy!r}.\n\n"
        f"The model was made {made}, and trains where it was made.\n\n"
        "Make and compile the model in `with strategy.scope():`, or call "
        f"{method} outside of the scope."
    )


def check_source(model: Any, method: str, source: Any) -> None:
    """Raise if the data of a call is a dataset of jaxdist, which Keras does not read.

    Raises:
        UnsupportedError: The data is such a dataset.
    """
    if isinstance(source, (DistributedDataset, DistributedIterator, Batches)):
        raise call_as(
            f"{method} of the Keras model {name_of(model)!r}",
            refuse,
            f"{source!r}.",
            "Keras reads arrays, generators, PyDatasets, and datasets of tf.data, PyTorch and "
            "Grain. The strategy of the model splits each batch over its replicas.",
            f"Pass arrays: {method}(x, y, batch_size=32); or a generator of global batches: "
            f"{method}((batch for batch in batches), steps_per_epoch=10).",
            kind=UnsupportedError,
        )


def current_model() -> Any:
    """Return the model that trains or evaluates now on a strategy, or None."""
    return _MODEL.get()


@contextlib.contextmanager
def use_model(model: Any, method: str) -> Iterator[None]:
    """Set the current model and its called method in a block."""
    with _compat.set_in_block(_MODEL, model), _compat.set_in_block(_METHOD, method):
        yield


def is_call_on_batch() -> bool:
    """Whether a method such as `train_on_batch` is called, which returns the result of a batch."""
    return _METHOD.get().endswith("_on_batch")


def has_own(model: Any, method: str) -> bool:
    """Whether the class of a model overrides a method of the trainer of Keras."""
    return getattr(type(model), method) is not getattr(
        keras_module("backend.jax.trainer").JAXTrainer, method
    )


@contextlib.contextmanager
def interrupt_between_steps() -> Iterator[None]:
    """Let Ctrl-C take effect between two steps of the calls in a block.

    A step reuses the memory of the state before it. So a model that is interrupted within a step
    would have neither state. See Note [Ctrl-C between steps].
    """
    with Interrupts() as interrupts, _compat.set_in_block(_INTERRUPTS, interrupts):
        yield
        # Do not lose an interrupt in the last step.
        interrupts.check()


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed since the last step."""
    if (interrupts := _INTERRUPTS.get()) is not None:
        interrupts.check()


# In the order of the state that Keras passes to a step function.
_OF_MODEL = ("trainable_variables", "non_trainable_variables")
_GROUPS = {
    "train": (*_OF_MODEL, "optimizer_variables", "metrics_variables"),
    "test": (*_OF_MODEL, "metrics_variables"),
    "predict": _OF_MODEL,
}


@contextlib.contextmanager
def give_back_after_errors(model: Any, kind: str, find_state: Callable[[], Any]) -> Iterator[None]:
    """Give the variables of a model their values back if the block raises an error.

    Keras takes the values out of the variables before the first step, and puts them back after
    the last one. After an error, evaluate and predict do not, and fit puts back the result of a
    step.

    Args:
        model: The Keras model.
        kind: "train", "test" or "predict".
        find_state: Returns the newest state whose memory no step has reused.
    """
    try:
        yield
    except StopIteration:  # There are no more batches.
        raise
    except BaseException:
        state = find_state()
        # A step that failed while it ran may have reused the memory.
        if not _compat.has_deleted(jax.tree.leaves(state)):
            model._jax_state = dict(zip(_GROUPS[kind], state, strict=True))
            model._jax_state_synced = False
            model.jax_state_sync()
        raise


def allow_layouts(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `compute_output_spec` in which layers may pass JAX a spec without a mesh.

    Keras finds the shapes of layers outside the step, which has the strategy's mesh.
    """

    def leave_out(sharding: Any, name: str) -> Any:
        is_spec = isinstance(sharding, PartitionSpec) and name == "with_sharding_constraint"
        strategy = _find_strategy()
        if not is_spec or strategy is None:
            return sharding
        # Only shapes count, and a layout does not change them.
        return NamedSharding(strategy.layout.auto_mesh, PartitionSpec())

    @functools.wraps(compute)
    def compute_without_layouts(*args: Any, **kwargs: Any) -> Any:
        if _find_strategy() is None:
            return compute(*args, **kwargs)
        with _compat.rewrite_shardings(leave_out):
            return compute(*args, **kwargs)

    return compute_without_layouts


def _find_strategy() -> Any:
    """Return the strategy of the called model, or of the scope."""
    model, frame = current_model(), _replica.innermost_explicit_frame()
    return strategy_of(model) if model is not None else frame and frame.strategy
