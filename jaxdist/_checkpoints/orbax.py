"""Writes and reads arrays with Orbax.

The functions import Orbax when they are called: the import takes 0.2 s, and most programs save
nothing.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist._checkpoints.as_bytes import name_stored_dtype, view_real, view_stored
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._processes import get_current_process

_LONGEST_REASON = 300  # characters


def start_arrays(folder: Path, leaves: Mapping[str, Any], writer: int) -> Callable[[], None]:
    """Copy the shards of this process to the host, and start to write them into a folder.

    The processes do not wait for each other here.

    Args:
        folder: The folder, which exists in all processes.
        leaves: Arrays over several processes, or NumPy arrays.
        writer: The process that writes the NumPy arrays and the names of all arrays.

    Returns:
        A function that waits until the shards are written.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    handler = _make_handler(writer)
    args = ocp.args.StandardSave(dict(leaves))
    # In a thread, since the caller may be a notebook, which already runs an event loop.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        save = handler.async_save(epath.Path(folder), args=args)
        futures = pool.submit(asyncio.run, save).result() or []

    def wait() -> None:
        for future in futures:
            future.result()

    return wait


@contextlib.contextmanager
def write_as_first_process() -> Iterator[None]:
    """Let Orbax write NumPy arrays in this process, whatever its index is.

    Orbax writes them only in process 0, which may have ended.
    """
    import orbax.checkpoint as ocp

    module = sys.modules[ocp.type_handlers.NumpyHandler.__module__]
    before = vars(module)["multihost"]
    vars(module)["multihost"] = _FirstProcess(before)
    try:
        yield
    finally:
        vars(module)["multihost"] = before


class _FirstProcess:
    def __init__(self, module: Any) -> None:
        self._module = module

    def process_index(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def merge_arrays(folder: Path, writer: int) -> None:
    """Merge the shards that all processes have written into one checkpoint."""
    from etils import epath

    _make_handler(writer).finalize(epath.Path(folder))


def list_stored_names(folder: Path) -> set[str]:
    """Return the names of the arrays in a folder that `merge_arrays` has completed."""
    import tensorstore

    # Not an address, in which `#`, `?` and `%` have a meaning.
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    keys = tensorstore.KvStore.open(spec).result().list().result()
    ending = "/.zarray"
    texts = [key.decode() for key in keys]
    return {text.removesuffix(ending) for text in texts if text.endswith(ending)}


def _make_handler(writer: int) -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointHandler(multiprocessing_options=_make_alone_options(writer))


def _make_alone_options(writer: int) -> Any:
    """Return options with which this process waits for no other process."""
    import orbax.checkpoint as ocp

    own = get_current_process().index
    return ocp.options.MultiprocessingOptions(primary_host=writer, active_processes={own})


def read_stored(path: Path, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name, as `target` describes them.

    Raises:
        UnreadableError: The arrays cannot be read.
    """
    import orbax.checkpoint as ocp

    own = get_current_process().index
    made = ocp.Checkpointer(_make_handler(own), multiprocessing_options=_make_alone_options(own))
    stored = {name: _as_stored(wanted) for name, wanted in target.items()}
    with _silence_orbax(), made as checkpointer:
        try:
            read = checkpointer.restore(path, args=ocp.args.StandardRestore(stored))
            return {name: view_real(read[name], wanted.dtype) for name, wanted in target.items()}
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).split('. See full')[0]}"
        # Orbax abandons the other reads that it started. Each of them reports an error on stderr
        # when it is garbage-collected. So collect them here, where `_silence_orbax` suppresses it.
        gc.collect()
    raise UnreadableError(why if len(why) <= _LONGEST_REASON else why[:_LONGEST_REASON] + "...")


def _as_stored(wanted: Any) -> Any:
    """Return a shape with a sharding, or an array of NumPy, in the dtype that is stored."""
    if isinstance(wanted, np.ndarray):
        return view_stored(wanted)
    return wanted.update(dtype=name_stored_dtype(wanted.dtype))


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Suppress Orbax's messages about an error that jaxdist reports."""
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)
