"""Changes classes of Keras, without effect on models that have no strategy."""

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._hooks import MAKE_SERVER_FUNCTION
from jaxdist._integers import check_all_fit
from jaxdist._keras.forward.marks import mark_assigned
from jaxdist._keras.functions import StepFunction
from jaxdist._keras.layers import (
    allow_synchronized,
    check_stateful,
    draw_by_replica,
    refuse_stateful,
    synchronize,
)
from jaxdist._keras.models import (
    allow_layouts,
    check_call,
    check_source,
    current_model,
    interrupt_between_steps,
    remember_strategy,
    strategy_of,
    use_model,
)
from jaxdist._keras.place import keep_copies, place_others, read_batches, take_own
from jaxdist._keras.shares import add_shares_to
from jaxdist._keras.source import WITH_VARIABLES, keras_module
from jaxdist._keras.variables import assign_in_step, make_outside, read_in_step
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import get_agreement

_CHANNEL = "keras_shuffle"
_FILES = "keras_files"
# Methods of callbacks of Keras that write or delete files. The processes of a job have the same
# callbacks with the same paths.
WRITERS = (
    ("model_checkpoint", "ModelCheckpoint", ("_save_model",)),
    ("backup_and_restore", "BackupAndRestore", ("_save_model", "on_train_end")),
    ("csv_logger", "CSVLogger", ("on_train_begin", "on_epoch_end", "on_train_end")),
)


def share_random_state(layout: ReplicaMesh, method: str) -> None:
    """Set NumPy's global random state, with which Keras shuffles, to that of process 0."""
    agreement = get_agreement() if layout.is_shared else None
    if agreement is None:
        return
    # Keras uses this generator.
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    own = json.dumps([name, np.asarray(keys).tolist(), position, has_gauss, gauss])
    said = agreement.gather(_CHANNEL, own, None, purpose=f"the order of rows in {method}")
    name, keys, position, has_gauss, gauss = json.loads(said[0])
    state = (name, np.array(keys, np.uint32), position, has_gauss, gauss)
    np.random.set_state(state)  # noqa: NPY002 (Keras uses it)


def write_once(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback method that only process 0 of the strategy of its model runs."""

    @functools.wraps(write)
    def write_in_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self.model)
        if strategy is None or _is_writer(strategy):
            return write(self, *args, **kwargs)
        return None

    return write_in_first


def _is_writer(strategy: Any) -> bool:
    if strategy._has_servers:
        # Each worker without a coordinator has the model and its callbacks.
        return bool(strategy.extended.should_checkpoint)
    return not strategy.layout.is_shared or strategy.layout.process.index == 0


def wait_for_files(layout: ReplicaMesh) -> None:
    """Wait until process 0 has written the files of its callbacks, so that all can read them."""
    agreement = get_agreement() if layout.is_shared else None
    if agreement is not None:
        agreement.gather(_FILES, "", None, purpose="the files of the callbacks of fit")


_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_INSTALLED: list[bool] = []


def install() -> None:
    """Make models that are made or compiled in the scope of a strategy train on its replicas."""
    if _INSTALLED:
        return
    _INSTALLED.append(True)
    trainer = keras_module("trainers.trainer").Trainer
    trainer.__init__ = _remember_in(trainer.__init__, "made")
    trainer.compile = _remember_in(trainer.compile, "compiled")
    if keras_module("backend.config").backend() != "jax":
        return
    on_jax = keras_module("backend.jax.trainer")
    for name in _CALLS:
        setattr(on_jax.JAXTrainer, name, _call_in_strategy(getattr(on_jax.JAXTrainer, name)))
    for kind in ("train", "test", "predict"):
        name = f"make_{kind}_function"
        made = _make_function(getattr(on_jax.JAXTrainer, name), kind)
        setattr(on_jax.JAXTrainer, name, made)
    on_jax.JAXTrainer.__setattr__ = _set_state
    on_jax.JAXTrainer.jax_state_sync = _sync(on_jax.JAXTrainer.jax_state_sync)
    backend = keras_module("backend")
    backend.compute_output_spec = allow_layouts(backend.compute_output_spec)
    iterator = on_jax.JAXEpochIterator
    iterator._get_iterator = _read_on_host(iterator._get_iterator)
    loss = keras_module("losses.loss").Loss
    loss.__call__ = add_shares_to(loss.__call__)
    seeds = keras_module("random.seed_generator").SeedGenerator
    seeds.next = draw_by_replica(seeds.next)
    norm = keras_module("layers.normalization.batch_normalization").BatchNormalization
    norm.__init__ = allow_synchronized(norm.__init__)
    norm._moments = synchronize(norm._moments)
    recurrent = keras_module("layers.rnn.rnn").RNN
    recurrent.call = refuse_stateful(recurrent.call)
    common = keras_module("backend.common.variables").Variable
    common.value = read_in_step(common.value)
    common.__init__ = make_outside(common.__init__)
    common.assign = mark_assigned(common.assign)
    for module, kind, names in WRITERS:
        callback = getattr(keras_module(f"callbacks.{module}"), kind)
        for name in names:
            setattr(callback, name, write_once(getattr(callback, name)))
    # A step may have these as arguments and in its closure; `_program` reads the mark.
    for module, kind in WITH_VARIABLES:
        getattr(keras_module(module), kind)._jaxdist_is_lifted = True
    variable = keras_module("backend.jax.core").JaxVariable
    variable._direct_assign = assign_in_step(variable._direct_assign)


def _remember_in(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        remember_strategy(self, what)
        return result

    return remember


def _call_in_strategy(method: Callable[..., Any]) -> Callable[..., Any]:
    # Keras also computes on arrays of the strategy between the steps.
    without_mesh = _compat.outside_of_meshes(method)

    @functools.wraps(method)
    @called(lambda method: f"{method.__name__} of Keras")
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = check_call(self, f"{method.__name__}")
        if strategy is None:
            return method(self, *args, **kwargs)
        for source in (*args[:1], kwargs.get("x"), kwargs.get("validation_data")):
            check_source(self, method.__name__, source)
        if method.__name__.endswith("_on_batch"):
            # Keras puts these arrays on a device before a step gets them.
            given = {**dict(zip(("x", "y", "sample_weight"), args, strict=False)), **kwargs}
            for name, value in given.items():
                check_all_fit(name, value)
        if current_model() is not None:
            with use_model(self, method.__name__):
                return method(self, *args, **kwargs)
        check_stateful(self, method.__name__, strategy)
        share_random_state(strategy.layout, method.__name__)
        with interrupt_between_steps(), use_model(self, method.__name__):
            result = without_mesh(self, *args, **kwargs)
            if method.__name__ == "fit":
                wait_for_files(strategy.layout)
            return result

    return call


def _make_function(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
    name = f"{kind}_function"

    @functools.wraps(method)
    def make(self: Any, force: bool = False) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return method(self, force)
        if force or getattr(self, name) is None:
            is_on_servers = strategy._has_servers
            made = MAKE_SERVER_FUNCTION.call if is_on_servers else StepFunction
            setattr(self, name, made(strategy, self, kind))
        return None

    return make


def _set_state(self: Any, name: str, value: Any) -> None:
    # A Keras model copies each list that it gets, and searches it for layers and variables. It
    # gets its whole state at each step.
    if name == "_jax_state" and strategy_of(self) is not None:
        object.__setattr__(self, name, value)
    else:
        super(keras_module("backend.jax.trainer").JAXTrainer, self).__setattr__(name, value)


def _sync(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def sync(self: Any) -> None:
        state, strategy = getattr(self, "_jax_state", None), strategy_of(self)
        if not state or self._jax_state_synced or strategy is None:
            method(self)
            return
        for function in (self.train_function, self.test_function):
            if hasattr(function, "owns") and function.owns(state):
                try:
                    function.sync()
                finally:
                    # After an error Keras syncs again, and would take values from before the steps.
                    self._jax_state_synced = True
                return
        groups = {
            name: self.optimizer.variables if name == "optimizer_variables" else getattr(self, name)
            for name in state
        }
        place_others([*groups.values()], strategy.layout)
        self._jax_state = {
            name: [take_own(v, x) for v, x in zip(groups[name], values, strict=True)]
            for name, values in state.items()
        }
        method(self)
        for name, arrays in state.items():
            keep_copies(groups[name], arrays)

    return sync


def _read_on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: Any) -> Any:
        return method(self) if current_model() is None else read_batches(self.data_adapter)

    return read
