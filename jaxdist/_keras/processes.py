"""Keeps the processes of a strategy together: the order of rows, and the files of callbacks."""

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist._keras.models import strategy_of
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
