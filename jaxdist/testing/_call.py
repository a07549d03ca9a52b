"""Calls a function in each process of `testing.launch`, and writes its result to a file."""

import json
import os
import pathlib
import pickle
import sys
import traceback
from typing import Any

from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError


def main(folder: str) -> None:
    """Call the function stored in a folder, and write its result or its exception there."""
    own = pathlib.Path(folder)
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    try:
        function = load(own / "function")
        content = _pickle_result(function())
    except Exception as error:
        (own / f"{index}.error").write_bytes(_pickle_error(error))
        raise
    (own / f"{index}.result").write_bytes(content)


def _pickle_result(result: Any) -> bytes:
    try:
        return dump(result)
    except Exception as error:
        raise ArgumentTypeError(
            f"testing.launch: the result {show(result)} cannot be pickled: {error}\n\n"
            "The result of each process goes to the caller through a file.\n\n"
            "Return numbers or NumPy arrays: np.asarray(value), or the local part of a global "
            "array, array.addressable_shards[0].data."
        ) from error


def _pickle_error(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        content = dump((error, text))
        # Some exceptions can be pickled but not unpickled: those with their own arguments.
        pickle.loads(content)
    except Exception:
        return pickle.dumps((None, text))
    return content


def dump(value: Any) -> bytes:
    """Pickle a value; if installed, with cloudpickle, which supports functions of a notebook."""
    cloudpickle: Any = sys.modules.get("cloudpickle")
    if cloudpickle is None:
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = pickle
    return cloudpickle.dumps(value)


def load(path: pathlib.Path) -> Any:
    """Read what `dump` wrote. The folder is private: only these processes write to it."""
    return pickle.loads(path.read_bytes())
