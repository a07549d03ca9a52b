"""The wrong-looking values that are accepted, each with the reason why that is right."""

import json
import pathlib
from typing import Any

FILE = pathlib.Path(__file__).with_name("accepted.json")


def accepted() -> dict[str, list[str]]:
    """For each parameter, the names of the values that it takes."""
    return {name: entry["values"] for name, entry in _entries().items()}


def reasons() -> dict[str, str]:
    """For each parameter, why these values are right."""
    return {name: entry["why"] for name, entry in _entries().items()}


def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found
