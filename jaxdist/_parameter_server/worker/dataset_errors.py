"""What errors say of the datasets of workers."""

import os
import traceback
from typing import Any

from jaxdist.errors import ClosureInputError, UnknownError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def name_dataset(dataset_or_fn: Any) -> str:
    """Return how errors call a dataset: by the function that makes it, or by its type."""
    name = getattr(dataset_or_fn, "__name__", None)
    return f"{name}()" if isinstance(name, str) else f"a {type(dataset_or_fn).__name__}"


def make_input_error(
    worker: int, failed: str, dataset: str, error: BaseException
) -> ClosureInputError:
    """Return the error of a function that needs what a dataset could not give.

    Args:
        worker: The number of the worker.
        failed: What it could not do.
        dataset: What `name_dataset` returns.
        error: What the dataset raised.
    """
    # What another process raised has a class and a text already.
    is_told = isinstance(error, UnknownError)
    text = str(error) if is_told else f"{type(error).__name__}: {error}"
    line = "its log has the traceback" if is_told else find_line(error)
    return ClosureInputError(
        f"Worker {worker} could not {failed} of {dataset}: {text}"
        f"{'' if line is None else f' ({line})'}\n\n"
        "A function needs the value of the worker that runs it.\n\n"
        "Correct the function that was given to create_per_worker_dataset, and create the "
        "dataset again.",
        error,
    )


def find_line(error: BaseException) -> str | None:
    """Return the last line outside of jaxdist that an error passed; None without such a line."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_PACKAGE + os.sep):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
