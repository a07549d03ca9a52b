"""Tests with other tools run in `make test-tools` only, in the environment of one tool."""

import os
import pathlib

_TOOL = os.environ.get("JAXDIST_TOOL")


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leave out the tests of other tools; without a tool, all."""
    name = collection_path.stem
    if not name.startswith("test_"):
        return None
    return None if _TOOL is not None and name in ("test_programs", f"test_{_TOOL}") else True
