"""One call with one wrong argument: what came of it, and what it left behind."""

import dataclasses
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jaxdist
from jaxdist._processes import settings
from jaxdist.errors import JaxdistError
from tests.bad_inputs.bad_values import BAD_VALUES
from tests.bad_inputs.call import Call

# What Python itself says of calls that do not fit the signature of a function.
_SIGNATURE = re.compile(
    r"missing \d+ required|unexpected keyword argument|takes .*argument|got multiple values|"
    r"takes no arguments|not subscriptable"
)
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"}
_PROCESSES = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "os.exec"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a call: nothing raised, an error of ours, or a raw one; and what is left."""

    error: BaseException | None
    left: tuple[str, ...]

    @property
    def is_accepted(self) -> bool:
        """Whether nothing was raised."""
        return self.error is None

    @property
    def is_raw(self) -> bool:
        """Whether the error is neither one of ours nor Python's about a signature."""
        error = self.error
        if error is None or isinstance(error, JaxdistError):
            return False
        return not is_about_a_signature(error)

    @property
    def is_signature(self) -> bool:
        """Whether Python itself refused the call."""
        return self.error is not None and is_about_a_signature(self.error)

    def names(self, called: str, parameter: str) -> bool:
        """Whether the error says what was called, as users write it, and the parameter."""
        text = "\n".join([str(self.error), *getattr(self.error, "__notes__", ())])
        *owner, last = [part.removesuffix("(...)") for part in called.split(".")]
        written = {"__getitem__": f"{owner[-1]}.*\\[", "__call__": rf"\b{owner[-1]}\b"}
        # The class may be a subclass: a `DigitsTask` is a `Task`.
        plain = rf"{last}\b" if last[0].isupper() else rf"\b{last}\b"
        has_name = re.search(written.get(last, plain), text)
        return has_name is not None and re.search(rf"\b{parameter}\b", text) is not None


class _Watch:
    """Which files and processes Python was asked for while `on`; a hook cannot be taken away."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._installed = False

    def install(self) -> None:
        """Begin to listen to what Python is asked for."""
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _PROCESSES:
            self.seen.append(f"process: {given[0]}")
        elif event == "open" and isinstance(given[0], (str, bytes)):
            is_written = given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if is_written and not _is_temporary(os.fsdecode(given[0])):
                self.seen.append(f"file: {os.fsdecode(given[0])}")
        elif event in _WRITES and not _is_temporary(os.fsdecode(given[0])):
            self.seen.append(f"{event}: {os.fsdecode(given[0])}")


def _is_temporary(path: str) -> bool:
    where = os.path.abspath(path)
    return where.startswith((tempfile.gettempdir() + os.sep, "/dev/")) or (
        "__pycache__" in where and where.startswith(sys.prefix)
    )


_WATCH = _Watch()


@contextmanager
def _watched() -> Iterator[list[str]]:
    _WATCH.install()
    _WATCH.seen = []
    _WATCH.on = True
    try:
        yield _WATCH.seen
    finally:
        _WATCH.on = False


def attempt(call: Call, parameter: str, value: str, folder: pathlib.Path) -> Outcome:
    """Call with the argument for `parameter` replaced by the bad value of this name.

    The call is made in `folder`, since the name of a file may be nonsense.
    """
    arguments = {**call.arguments(), parameter: BAD_VALUES[value]()}
    fn = call.fn()
    threads = set(threading.enumerate())
    error: BaseException | None = None
    before = os.getcwd()
    os.chdir(folder)
    try:
        with _watched() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call.use(fn(**arguments))
            except BaseException as raised:  # an exit or an interrupt is a fault as well
                error = raised
    finally:
        os.chdir(before)
    left = [*seen]
    del arguments
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)
        if thread.is_alive():
            left.append(f"thread: {thread.name}")
    left += [f"process: {p.name}" for p in multiprocessing.active_children()]
    if jaxdist.has_strategy() and fn is not jaxdist.experimental_set_strategy:
        left.append("a strategy")
    if jaxdist.config.steps_run_eagerly():
        left.append("steps run eagerly")
    put_back()
    return Outcome(error, tuple(left))


def put_back() -> None:
    """Undo what valid calls set for the process."""
    if jaxdist.has_strategy():
        jaxdist.experimental_set_strategy(None)
    jaxdist.config.links(None)
    jaxdist.config.compilation_cache(None)
    settings._chosen.clear()


def is_about_a_signature(error: BaseException) -> bool:
    """Whether Python itself says that a call does not fit the signature of a function."""
    return isinstance(error, TypeError) and _SIGNATURE.search(str(error)) is not None
