"""Writes and reads checkpoints with Orbax.

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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._checkpoints.files import read_dict
from jaxdist._checkpoints.records import format_records, prepare_records, read_records
from jaxdist._processes import Process, get_current_process

Manager: TypeAlias = Any  # orbax.checkpoint.CheckpointManager

_LONGEST_REASON = 300  # characters
STATE, NOTES, LEAVES = "state", "notes", "leaves"  # the items of one checkpoint


def open_manager(directory: Path) -> Manager:
    """Open Orbax's manager of a directory, and delete the partly written checkpoints in it.

    The manager never deletes complete checkpoints: Orbax would delete file by file, in place.

    Args:
        directory: The directory of the checkpoints. No other job writes into it.
    """
    import orbax.checkpoint as ocp

    # Defined here, since its base class is in Orbax.
    class RecordsHandler(ocp.JsonCheckpointHandler):
        """Writes strings that each process computes in the background.

        Orbax's own handler writes values that are known in advance, and only in process 0.
        """

        async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
            async def write() -> None:
                for name, compute_text in args.item.items():
                    (directory / name).write_text(compute_text())

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="records")]

    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(LEAVES, ocp.args.JsonSave, RecordsHandler())
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        # Otherwise, if the directory cannot be created, Orbax reports it only after five minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=handlers)


def start_checkpoint(
    manager: Manager,
    step: int,
    leaves: Mapping[str, Any],
    notes: Mapping[str, Any],
    process: Process,
) -> None:
    """Copy the leaves to the host, and let Orbax write a checkpoint in the background."""
    import orbax.checkpoint as ocp

    # Copy NumPy arrays, since the caller may change them afterwards.
    leaves = {n: x if isinstance(x, jax.Array) else np.array(x) for n, x in leaves.items()}
    compute_records = prepare_records(leaves, process)

    def compute_text() -> str:
        return format_records(compute_records(), notes, process)

    items = {
        # Orbax rejects arrays without elements. Their shape and dtype are in the records.
        STATE: ocp.args.StandardSave({n: x for n, x in leaves.items() if x.size}),
        NOTES: ocp.args.JsonSave(notes),
        LEAVES: ocp.args.JsonSave({f"process_{process.index}.json": compute_text}),
    }
    manager.save(step, args=ocp.args.Composite(**items), force=True)


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

    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
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


def read_notes(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of the leaves, and the notes of a checkpoint.

    Raises:
        UnreadableError: The records or the notes differ from what was written.
    """
    notes = read_notes_without_orbax(path)
    if notes is None:
        raise UnreadableError("The notes cannot be read.")
    try:
        return read_records(path / LEAVES, notes), notes
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"The checksums cannot be read: {error}") from error


def read_notes_without_orbax(path: Path) -> dict[str, Any] | None:
    """Return the notes of a checkpoint from their file; None if the file cannot be read."""
    return read_dict(path / NOTES / "metadata")


def read_arrays(
    path: Path,
    wanted: Mapping[str, Any],
    sharding: Sharding | None,
    own: Mapping[str, Sharding],
) -> dict[str, Any]:
    """Return the leaves of a checkpoint by name, with their shardings.

    Args:
        path: The directory of the checkpoint.
        wanted: Shapes and dtypes, by name.
        sharding: The sharding of each leaf; None takes that of the leaf in `wanted`.
        own: Shardings by name that take precedence over `sharding`.

    Raises:
        UnreadableError: The leaves cannot be read.
    """
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=own.get(name) or sharding or getattr(x, "sharding", None) or one_device,
        )
        if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
        # JAX has no arrays of this dtype (float64 without x64, for a Python float): use NumPy.
        else np.empty(x.shape, x.dtype)
        for name, x in wanted.items()
    }
    read = _read_stored(path / STATE, {name: x for name, x in target.items() if x.size})
    return {name: read[name] if x.size else _make_empty(x) for name, x in target.items()}


def _make_empty(wanted: jax.ShapeDtypeStruct | np.ndarray) -> Any:
    if isinstance(wanted, np.ndarray):
        return wanted
    return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)


def _read_stored(path: Path, target: Mapping[str, Any]) -> Any:
    import orbax.checkpoint as ocp

    own = get_current_process().index
    made = ocp.Checkpointer(_make_handler(own), multiprocessing_options=_make_alone_options(own))
    with _silence_orbax(), made as checkpointer:
        try:
            return checkpointer.restore(path, args=ocp.args.StandardRestore(target))
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).split('. See full')[0]}"
        # Orbax abandons the other reads that it started. Each of them reports an error on stderr
        # when it is garbage-collected. So collect them here, where `_silence_orbax` suppresses it.
        gc.collect()
    raise UnreadableError(why if len(why) <= _LONGEST_REASON else why[:_LONGEST_REASON] + "...")


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
