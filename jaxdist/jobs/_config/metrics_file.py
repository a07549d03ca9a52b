"""The metrics file of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist._checkpoints import read_dict, replace_file


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write a JSON file. A reader sees the old file or all of the new one, never a part."""
    text = json.dumps(metrics, indent=2, allow_nan=True) + "\n"
    replace_file(path, text.encode())


def read_metrics(path: Path) -> dict[str, Any] | None:
    """Read a metrics file. Return None if it is missing or not valid."""
    return read_dict(path)
