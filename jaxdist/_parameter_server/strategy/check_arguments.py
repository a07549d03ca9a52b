"""Checks of what is scheduled: arguments that no worker can use."""

import concurrent.futures
import inspect
import io
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxdist._called import refuse, refuse_type
from jaxdist._parameter_server.coordinator import PerWorkerDataset, PerWorkerValues
from jaxdist._program import argument_name, is_unit
from jaxdist._values import BatchSource
from jaxdist.errors import CallArgumentsError

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


def check_signature(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments that the function does not take: too many, too few, or unknown names.

    Raises:
        CallArgumentsError: The function cannot be called with these arguments.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # Of a builtin: only a call tells.
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        problem = str(error)
    count = len(args)
    names = f" and the keywords {', '.join(map(str, kwargs))}" if kwargs else ""
    name = getattr(fn, "__name__", type(fn).__name__)
    taken = ", ".join(map(_format_parameter, signature.parameters.values()))
    raise refuse(
        f"args with {count} value{'s' * (count != 1)}{names} for {name}: {problem}.",
        f"A worker calls the function with args and kwargs, and it is {name}({taken}).",
        _suggest_arguments(list(signature.parameters.values())),
        kind=CallArgumentsError,
    )


def _format_parameter(one: inspect.Parameter) -> str:
    if one.kind is one.VAR_POSITIONAL:
        return f"*{one.name}"
    if one.kind is one.VAR_KEYWORD:
        return f"**{one.name}"
    return one.name if one.default is one.empty else f"{one.name}=..."


def _suggest_arguments(parameters: Sequence[inspect.Parameter]) -> str:
    """Return the call with all required parameters."""
    needed = [one for one in parameters if one.default is one.empty]
    by_place = [p.name for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    parts = []
    if by_place:
        parts.append(f"args=({', '.join(by_place)}{',' * (len(by_place) == 1)})")
    if by_name:
        parts.append("kwargs={" + ", ".join(f"{n!r}: {n}" for n in by_name) + "}")
    if not parts:
        parts = ["neither args nor kwargs"]
    optional = [one.name for one in parameters if one.default is not one.empty]
    more = f"; {' and '.join(optional)} may follow" if optional else ""
    return f"Pass {' and '.join(parts)}{more}."


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
