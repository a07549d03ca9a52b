"""`summaries.jsonl`: numbers of a training or an evaluation, one line for each step."""

import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

_NAME = "summaries.jsonl"


def write_summary(folder: pathlib.Path, step: int, values: Mapping[str, Any]) -> None:
    """Add one line to the summaries of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: float(np.asarray(value)) for name, value in values.items()}
    line = json.dumps({"step": step, "time": time.time(), **plain})
    with (folder / _NAME).open("a") as file:
        # One write, so that a reader of another process sees whole lines.
        file.write(line + "\n")


def read_summaries(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    """Return the numbers by step; of a step that was written twice, the last ones."""
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
            # The process that wrote it was killed in the middle of the line.
            continue
    return found
