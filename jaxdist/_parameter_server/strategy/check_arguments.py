"""Checks of what is scheduled: arguments that no worker can use."""

import concurrent.futures
import io
import queue
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxdist._called import refuse_type
from jaxdist._parameter_server.coordinator import PerWorkerDataset, PerWorkerValues
from jaxdist._program import argument_name, is_unit
from jaxdist._values import BatchSource

# Objects that mean something to the threads of this process only.
_OF_THREADS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Barrier,
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Thread,
    queue.Queue,
    queue.SimpleQueue,
    socket.socket,
    concurrent.futures.Executor,
    concurrent.futures.Future,
)


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for an argument that is neither data nor a constant, such as an open file.

    Raises:
        ArgumentTypeError: It is an open file, an iterator, or a lock or the like.
    """
    for path, leaf in _list_leaves(args, kwargs):
        what, remedy = None, ""
        if isinstance(leaf, io.IOBase):
            what = "an open file"
            remedy = (
                "Read it here, and pass arrays; or open it in the function that is given to "
                "create_per_worker_dataset."
            )
        elif isinstance(leaf, Iterator) and not isinstance(leaf, BatchSource | PerWorkerValues):
            what = "an iterator"
            remedy = (
                "Let each worker make its own: pass iter(coordinator.create_per_worker_dataset("
                f"make_batches)). Or take an element here, and pass it: next({path})."
            )
        elif isinstance(leaf, _OF_THREADS):
            what = "an object of this process"
            remedy = (
                "Leave it out, or use it outside, around schedule and fetch. Servers apply the "
                "changes of one function after the other, so a function needs no lock."
            )
        if what is not None:
            raise refuse_type(
                f"{path}, {what} ({type(leaf).__name__}).",
                "A worker has the compiled program of a function, and the arrays that are its "
                "arguments; it may be another process, which has no such object.",
                remedy,
            )


def raise_no_iterator(
    args: Sequence[Any], kwargs: Mapping[str, Any], given: PerWorkerDataset
) -> NoReturn:
    """Raise the error for a per-worker dataset that was passed where its iterator belongs."""
    name = next(path for path, leaf in _list_leaves(args, kwargs) if leaf is given)
    raise refuse_type(
        f"{name}, a per-worker dataset, and not its iterator.",
        "A function takes batches from an iterator, which keeps its place between calls.",
        f"Call iterator = iter(dataset) once, and pass iterator instead of {name}.",
    ) from None


def _list_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    # The value of a sharded variable would be fetched.
    leaves, _ = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)), is_leaf=is_unit)
    return [(argument_name(path), leaf) for path, leaf in leaves]
