"""`testing.launch`: calls a function in several processes."""

import pathlib
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching import Job, Outcome, Patience, collect_signals, run_attempt, write_to
from jaxdist._validate import as_integer, as_number, check_callable
from jaxdist.errors import DeadlineExceededError, LaunchError
from jaxdist.testing._call import dump, load
from jaxdist.training import require_extra

_CALLER = "testing.launch"


@called(_CALLER)
def launch(
    function: Callable[[], Any],
    n: int,
    *,
    devices_per_process: int = 1,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call a function in several processes of this machine, and return their results.

    Each process is a worker of a `MultiWorkerMirroredStrategy`, as with `jaxdist launch`. The
    output of the processes appears here, each line with the number of its process. The processes
    are new: they contain no earlier results, and JAX starts with the function.

    A function of a module is imported by each process. A notebook function, a lambda or a nested
    function is sent by value, together with the global names that it uses; this requires the
    package cloudpickle. Results come back by pickle, through a private folder.

    Args:
        function: Called without arguments in each process.
        n: Number of processes.
        devices_per_process: GPUs of each process if there are GPUs, else CPU devices.
        timeout_seconds: Processes that take longer are ended; None waits forever.

    Returns:
        The results, in the order of the processes.

    Raises:
        Exception: The exception of the function in the process that failed first. Its note has the
            number of the process and the traceback.
        LaunchError: A process ended without an exception, or could not be started.
        DeadlineExceededError: A process took longer than `timeout_seconds`.
        MissingExtraError: The function has to be sent by value, and cloudpickle is not installed.
        ArgumentError: A number is out of range.
        ArgumentTypeError: `function` is not a function, or a number is not a number.

    Cost:
        Starts n processes that import JAX, some seconds.

    Example:
        >>> def add():
        ...     import os, json
        ...
        ...     return 10 + json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        >>> jaxdist.testing.launch(add, 2)
        [10, 11]

    Source:
        `tf.__internal__.distribute.multi_process_runner.run`, and `accelerate.notebook_launcher`.
    """
    check_callable(function, "function", "Pass the function itself: launch(train, 2), not train().")
    as_integer("devices_per_process", devices_per_process, least=1, example=1)
    if timeout_seconds is not None:
        as_number("timeout_seconds", timeout_seconds, least=0, example=60)
        if timeout_seconds == 0:
            raise refuse(
                "timeout_seconds=0.",
                "timeout_seconds is above 0, or None.",
                "Pass for instance timeout_seconds=60.",
            )
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as name:
        folder = pathlib.Path(name)
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from jaxdist.testing._call import main; main({name!r})"
        )
        job = Job(
            [sys.executable, "-c", start],
            n,
            devices_per_process=devices_per_process,
            patience=Patience(job=timeout_seconds),
            caller=_CALLER,
        )
        (folder / "function").write_bytes(_pickle_function(function))
        with collect_signals((signal.SIGINT,)) as signals:
            outcome = run_attempt(job, (write_to(sys.stdout), write_to(sys.stderr)), signals)
        if outcome.signal is not None:
            raise KeyboardInterrupt
        _raise_first_cause(outcome, folder, timeout_seconds)
        return [_read_result(folder, index) for index in range(n)]


def _pickle_function(function: Callable[[], Any]) -> bytes:
    if not _is_importable(function):
        require_extra("cloudpickle", "send a function of a notebook to other processes")
    return dump(function)


def _is_importable(function: Any) -> bool:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "") if module != "__main__" else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _raise_first_cause(outcome: Outcome, folder: pathlib.Path, seconds: float | None) -> None:
    cause = outcome.cause
    if cause is not None:
        error, text = _read_error(folder, cause.index)
        if error is not None:
            error.add_note(f"Raised in process {cause.index}:\n{text}")
            raise error
        # Errors of the other processes, if the cause itself has no readable error.
        found = (_read_error(folder, end.index)[0] for end in outcome.ends)
        raise LaunchError(
            f"{_CALLER}: process {cause.index} failed.\n\n{text or cause.text}\n\n"
            "The output of the processes is above."
        ) from next((error for error in found if error is not None), None)
    if outcome.late:
        numbers = ", ".join(map(str, outcome.late))
        processes = "process" if len(outcome.late) == 1 else "processes"
        raise DeadlineExceededError(
            f"{_CALLER}: {processes} {numbers} did not return within {seconds} s.\n\n"
            "Processes that take longer than timeout_seconds are ended.\n\n"
            "Pass a larger timeout_seconds, or None to wait forever.",
            outcome.late,
        )


def _read_error(folder: pathlib.Path, index: int) -> tuple[Exception | None, str]:
    path = folder / f"{index}.error"
    if not path.exists():
        return None, ""
    error, text = load(path)
    return error, text


def _read_result(folder: pathlib.Path, index: int) -> Any:
    path = folder / f"{index}.result"
    if not path.exists():
        raise LaunchError(
            f"{_CALLER}: process {index} ended with exit code 0 before the function returned.\n\n"
            "Each process returns a result.\n\nReturn instead of calling sys.exit or os._exit."
        )
    return load(path)
