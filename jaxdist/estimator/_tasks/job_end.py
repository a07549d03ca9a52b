"""Reports the end of training: the chief to the evaluator, a worker to its launcher."""

import json
import os
import pathlib
import time

from jaxdist._checkpoints import read_dict, replace_file
from jaxdist._launching import FINISHED, LAUNCH_ID

_NAME = "training_end.json"
_LAUNCHER = "JAXDIST_LAUNCHER"


def tell_end(model_dir: str, step: int) -> None:
    """Write a file that says that training has ended, at which step, and in which job."""
    content = {"step": step, "job": os.environ.get(LAUNCH_ID), "time": time.time()}
    replace_file(pathlib.Path(model_dir, _NAME), json.dumps(content).encode())


def find_end(model_dir: str, since: float) -> int | None:
    """Return the last step of the training of this job; None while it runs.

    Args:
        model_dir: The folder of the model.
        since: When this process began. Without a launcher, an older end is of another job.
    """
    found = read_dict(pathlib.Path(model_dir, _NAME))
    try:
        if found is None:
            return None
        own = os.environ.get(LAUNCH_ID)
        is_own = found["job"] == own if own else found["time"] >= since
        return int(found["step"]) if is_own else None
    except (LookupError, TypeError, ValueError):
        return None


def tell_launcher() -> None:
    """Report to `jaxdist launch` that this worker has done its part and may end."""
    folder = os.environ.get(_LAUNCHER)
    if folder:
        pathlib.Path(folder, FINISHED).touch()
