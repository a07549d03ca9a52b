"""Writes numbers of a training or an evaluation as lines of JSON, and as TensorBoard events."""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdist.training import EXTRAS

_NAME = "summaries.jsonl"
TENSORBOARD = next(extra for extra in EXTRAS if extra.name == "tensorboardX")


class Summaries:
    """Writes `summaries.jsonl`, one line for each step, and events if tensorboardX is installed.

    jaxdist itself reads only the lines.

    Args:
        folder: The folder of both.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._events: Any = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a step; they are on disk afterwards."""
        self._folder.mkdir(parents=True, exist_ok=True)
        plain = {name: float(np.asarray(value)) for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **plain})
        with (self._folder / _NAME).open("a") as file:
            # One write, so that readers in other processes see whole lines.
            file.write(line + "\n")
        if not TENSORBOARD.is_installed:
            return
        if self._events is None:
            from tensorboardX import SummaryWriter

            # tensorboardX names files by the second, and would overwrite one of the same second.
            self._events = SummaryWriter(
                str(self._folder), filename_suffix=f".{time.time_ns()}.{os.getpid()}"
            )
        for name, value in plain.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the event file, and end the thread that writes it."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


def write_summary(folder: pathlib.Path, step: int, values: Mapping[str, Any]) -> None:
    """Write the numbers of one step."""
    with contextlib.closing(Summaries(folder)) as summaries:
        summaries.write(step, values)


def read_summaries(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    """Return the numbers by step; the last ones, if a step was written twice."""
    found: dict[int, dict[str, float]] = {}
    try:
        lines = (folder / _NAME).read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            values = json.loads(line)
            found[int(values.pop("step"))] = values
        except (ValueError, LookupError, TypeError, AttributeError):
            # The writing process was killed in the middle of the line.
            continue
    return found
