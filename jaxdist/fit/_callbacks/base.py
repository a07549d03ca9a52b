"""`Callback`, `LambdaCallback`, `CallbackList`, which calls all, and the values they watch."""

import contextlib
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._validate import as_list, as_number, check_callable, check_text, show

Logs = Mapping[str, float]


class Callback:
    """Code that runs at the beginning and end of training, epochs and batches.

    Override any of the methods. `self.model` is the `fit.Model`, and `self.params` has `epochs`,
    `steps` (of an epoch, or None) and `verbose`. Set `self.model.stop_training = True` to end the
    training after this epoch; in `on_train_batch_end`, after this batch.

    A callback that keeps values from one epoch to the next overrides `get_state` and `set_state`
    too: then a training that `ModelCheckpoint(resume=True)` continues has them.

    Cost:
        `on_train_batch_end` and `on_test_batch_end` get the loss and metrics up to this batch, so
        a callback that overrides one waits for the devices after each batch.

    Example:
        >>> class PrintLoss(fit.Callback):
        ...     def on_epoch_end(self, epoch, logs):
        ...         print(epoch, sorted(logs))
        >>> PrintLoss().on_epoch_end(0, {"loss": 1.0})
        0 ['loss']

    Source:
        `keras.callbacks.Callback`.
    """

    model: Any = None
    params: Mapping[str, Any] = {}
    # The `Monitor` of the value that it reads after each epoch.
    _watched: Any = None
    # Whether it saves the states of the others, and so gets `on_epoch_end` after them.
    _saves_states = False

    def set_model(self, model: Any) -> None:
        """Set the model. Called before training."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Set the parameters of the call. Called before training."""
        self.params = params

    def get_state(self) -> Any:
        """Return the state that a checkpoint keeps of this callback; None for no state.

        It may consist of numbers, strings, bytes, None, arrays, dicts with string keys, lists and
        tuples. `ModelCheckpoint` calls this after `on_epoch_end` of all callbacks, or after a step.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Continue from the state that `get_state` returned.

        Called when a training resumes: after `on_train_begin`, and after `on_epoch_begin` if it
        continues within an epoch. Tuples come back as lists, and arrays as NumPy arrays.
        """

    def close(self) -> None:
        """Release files and threads. Called when a `fit` ends, also after an error."""

    def _complete(self) -> None:
        """Called before `close` when a `fit` ends without an error of anything in it."""

    def _in_evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of each evaluation and prediction."""
        return contextlib.nullcontext()

    def on_train_begin(self, logs: Logs) -> None:
        """Called before the first epoch."""

    def on_train_end(self, logs: Logs) -> None:
        """Called after the last epoch, with its logs. Not called after an error."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Called before an epoch; epochs are counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch and its validation, whose values begin with `val_`."""

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a dispatch; `batch` is the first of its batches."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a dispatch; `batch` is the last of its batches."""

    def on_test_begin(self, logs: Logs) -> None:
        """Called before an evaluation."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after an evaluation, with its logs."""

    def on_test_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a batch of an evaluation."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Called before a prediction."""

    def on_predict_end(self, logs: Logs) -> None:
        """Called after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a batch of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a batch of a prediction."""


class CallbackList:
    """Calls a method of all callbacks that override it.

    Args:
        caller: The method of the model, for messages.
        callbacks: The callbacks of the user.
        model: The model.
        params: The argument of `set_params`.
    """

    def __init__(self, callbacks: Iterable[Any], model: Any, params: Mapping[str, Any]) -> None:
        what, remedy = "a list of fit.Callback", "Pass callbacks=[fit.EarlyStopping()]."
        self.callbacks: Sequence[Callback] = as_list(
            "callbacks", callbacks, what, remedy, kind=Callback
        )
        for callback in self.callbacks:
            _check_states(callback)
            callback.set_model(model)
            callback.set_params(params)

    def has(self, method: str) -> bool:
        """Whether a callback has its own method. The others cost nothing."""
        inherited = getattr(Callback, method)
        return any(
            getattr(callback, method) != types.MethodType(inherited, callback)
            for callback in self.callbacks
        )

    @contextlib.contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Enter the contexts of all callbacks for an evaluation."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback._in_evaluation())
            yield

    def complete(self) -> None:
        """Tell all callbacks that `fit` has ended without an error."""
        for callback in self.callbacks:
            callback._complete()

    def close(self) -> None:
        """Close all callbacks, also if closing one of them raises an error."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all callbacks in their order; those that save are called last.

        An exception keeps its type, and gets a note that says which callback raised it.
        """
        called = self.callbacks
        if method == "on_epoch_end":
            called = sorted(called, key=lambda callback: callback._saves_states)
        for callback in called:
            try:
                getattr(callback, method)(*args)
            except Exception as error:
                name = f"{method}({args[0]})" if isinstance(args[0], int) else method
                error.add_note(
                    f"Raised by the callback {type(callback).__name__}.{name}. The model "
                    "has the state after the last complete step, and fit can be called again."
                )
                raise


def _check_states(callback: Callback) -> None:
    own = [
        name
        for name in ("get_state", "set_state")
        if getattr(type(callback), name) is not getattr(Callback, name)
    ]
    if len(own) == 1:
        missing = "set_state" if own == ["get_state"] else "get_state"
        raise refuse_type(
            f"the callback {type(callback).__name__}, which has {own[0]} and no {missing}.",
            "When training resumes, set_state gets what get_state returned.",
            f"Give it a {missing} as well.",
        )


_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        functions: Functions by the name of the method: `on_epoch_end=lambda epoch, logs: ...`.

    Raises:
        ArgumentError: A name is not a method of a callback.

    Example:
        >>> printer = fit.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch))
        >>> printer.on_epoch_end(3, {})
        3

    Source:
        `keras.callbacks.LambdaCallback`.
    """

    @called("fit.LambdaCallback")
    def __new__(cls, **functions: Callable[..., Any]) -> "LambdaCallback":
        wrong = sorted(set(functions) - set(_METHODS))
        if wrong:
            raise refuse(
                f"{', '.join(wrong)}.",
                f"The methods of a callback are {', '.join(_METHODS)}.",
                "Pass functions by these names.",
            )
        for name, function in functions.items():
            check_callable(function, name)
        # Each has its own class, since the class says which methods a callback overrides.
        methods = {name: staticmethod(function) for name, function in functions.items()}
        kind = type("LambdaCallback", (cls,), {**methods, "__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(self, **functions: Callable[..., Any]) -> None:
        super().__init__()


# Words in the names of values for which higher, or lower, is better.
_MORE_IS_BETTER = {
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "specificity", "sensitivity"),
    *("fbeta", "fmeasure", "fscore", "top", "iou", "dice"),
}
_LESS_IS_BETTER = {
    *("loss", "error", "mse", "mae", "rmse", "mape", "msle", "huber", "cosh", "nll"),
    *("entropy", "crossentropy", "perplexity", "divergence", "deviance", "hinge"),
}


def _find_mode(name: str) -> str | None:
    """Return "min" or "max" by the last word of a name that says which; None if no word does.

    The last word is what is measured: `recall_loss` is a loss, and `loss_accuracy` is not.
    """
    # Split `BinaryAccuracy` before its capitals, and drop digits: `acc1`, `top_5`.
    words = re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    for word in reversed(words):
        stem = word.rstrip("0123456789")
        if stem in _LESS_IS_BETTER:
            return "min"
        # `f1`, but not `f`.
        if stem in _MORE_IS_BETTER or (stem == "f" and word != "f"):
            return "max"
    return None


class Monitor:
    """Follows one value of the logs.

    Args:
        caller: The callback, for messages.
        name: The name in the logs, such as "val_loss".
        mode: "min", "max", or "auto" by the name.
        min_delta: By how much a value has to be better to count.

    Raises:
        ArgumentError: The mode is unknown, or it is "auto" and the name does not say which.
    """

    def __init__(self, name: str, mode: str, min_delta: float = 0.0) -> None:
        check_text("monitor", name, "val_loss")
        if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
            raise refuse(
                f"mode={show(mode)}.",
                "It says whether the best value is the smallest or the largest.",
                "Pass 'min', 'max', or 'auto', which decides by the name.",
            )
        if mode == "auto":
            found = _find_mode(name)
            if found is None:
                raise refuse(
                    f"monitor={name!r} and mode='auto'.",
                    "'auto' reads in the name whether the best value is the smallest, as of a "
                    "loss or an error, or the largest, as of an accuracy; this name says neither.",
                    "Pass mode='min' or mode='max'.",
                )
            mode = found
        self.name, self._caller = name, name_call()
        self._sign = -1.0 if mode == "max" else 1.0
        self._delta = as_number("min_delta", min_delta, least=0.0)
        self.best = math.inf * self._sign

    @called(lambda self: self._caller)
    def read(self, logs: Mapping[str, float], model: Any) -> float | None:
        """Return the value, or None after an epoch without validation.

        Raises:
            ArgumentError: No epoch has this value in its logs.
            ArgumentTypeError: A callback of the user has set it to something else than a number.
        """
        if self.name not in logs:
            validates_every = getattr(model, "_validates_every", None)
            if self.name.startswith("val_") and (validates_every or 1) > 1:
                return None
            raise refuse(
                f"monitor={self.name!r}, and the epoch has {', '.join(logs) or 'no values'}.",
                "Values that begin with val_ exist only after a validation.",
                "Pass one of these names, or validation_data to fit.",
            )
        value = logs[self.name]
        if value is None:
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            raise refuse_type(
                f"monitor={self.name!r}, and a callback has set it to {show(value)}.",
                "It is one number, or None for an epoch without a value.",
                "Let the callback set logs[name] to a number, such as float(value).",
            ) from None

    @called(lambda self: self._caller)
    def check(self) -> None:
        """Check the name, for a `fit` without validation.

        Raises:
            ArgumentError: It is the name of a validation value.
        """
        if self.name.startswith("val_"):
            raise refuse(
                f"monitor={self.name!r}, and fit has neither validation_data nor validation_split.",
                "Values that begin with val_ exist only after a validation.",
                "Pass validation_data=(x, y) or validation_split=0.1 to fit, or monitor="
                f"{self.name.removeprefix('val_')!r}.",
            )

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best one. A nan is not."""
        return value * self._sign < self.best * self._sign - self._delta

    def reset(self, best: float | None = None) -> None:
        """Forget the best value, or set it."""
        self.best = math.inf * self._sign if best is None else best


def check_watched(callbacks: Sequence[Callback], *, validates: bool) -> None:
    """Check, before training, that the values that callbacks watch will exist.

    A callback of the user may add values to the logs of an epoch. If there is one, nothing is
    checked here.

    Args:
        callbacks: All callbacks of a `fit`.
        validates: Whether the `fit` has validation data.

    Raises:
        ArgumentError: A callback watches a validation value, and `fit` does not validate.
    """
    if validates or any(map(_may_add_values, callbacks)):
        return
    for callback in callbacks:
        if callback._watched is not None:
            callback._watched.check()


def _may_add_values(callback: Callback) -> bool:
    own = type(callback).on_epoch_end.__module__.partition(".")[0]
    return own != "jaxdist" or isinstance(callback, LambdaCallback)
