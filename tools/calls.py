"""`python -m tools.calls`: how many calls of jaxdist's functions stand between a user and JAX.

`run` is measured where the user's function is entered for the first time: the frames of jaxdist on
the stack. The other lines count every call of a function of jaxdist during the second call.
"""

import os
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import jaxdist

_PACKAGE = str(pathlib.Path(jaxdist.__file__).parent)


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def calls_of(fn: Callable[[], Any]) -> list[str]:
    """The files of jaxdist's functions that are called, one entry for each call."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        # A generator that goes on is no new call.
        is_new = frame.f_lasti <= 0 or not frame.f_code.co_flags & 0x20
        if event == "call" and is_new and _is_ours(frame.f_code.co_filename):
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


def frames_above_step(strategy: jaxdist.Strategy) -> list[str]:
    """The files of jaxdist's frames on the stack while a step is traced, the outermost first."""
    found: list[str] = []

    def step(x: Any) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if _is_ours(frame.f_code.co_filename):
                found.append(frame.f_code.co_filename)
            frame = frame.f_back
        return x + 1

    strategy.run(step, (np.float32(1),))
    return found[::-1]


def _line(name: str, files: list[str], details: bool) -> None:
    print(f"{name}: {len(files)} calls, {len(set(files))} files")
    if details:
        for file in files:
            print("   ", os.path.relpath(file, _PACKAGE))


def main() -> None:
    """Print one line for each entry."""
    details = "--files" in sys.argv
    jax.config.update("jax_num_cpu_devices", 8)
    strategy = jaxdist.MirroredStrategy()
    # What a step returns, as is usual.
    rows = strategy.run(_plus_one, (jaxdist.PerReplica([np.ones(2, np.float32)] * 8),))
    with strategy.scope():
        variable = jaxdist.Variable(np.float32(0))
    entries: dict[str, Callable[[], Any]] = {
        "run, second call": lambda: strategy.run(_plus_one, (np.float32(1),)),
        "reduce": lambda: strategy.reduce("sum", rows, axis=None),
        "gather": lambda: strategy.gather(rows, 0),
        "assign": lambda: variable.assign(1.0),
    }
    _line("run, first call, up to the user's function", frames_above_step(strategy), details)
    for name, entry in entries.items():
        entry()
        _line(name, calls_of(entry), details)


def _plus_one(x: Any) -> Any:
    return x + 1


if __name__ == "__main__":
    main()
