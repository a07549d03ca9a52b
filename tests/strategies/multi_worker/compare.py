"""Comparison of what processes return with what one process returns."""

from typing import Any

import numpy as np

from tests.strategies.multi_worker.cases import Own


def find_differences(there: Any, here: Any, exact: bool, path: str = "") -> list[str]:
    """List the places where values of a process differ from those of one process with all."""
    if isinstance(there, Own):
        pairs = [(f"{path}@{r}", value, here.values[r]) for r, value in there.values.items()]
    elif isinstance(there, dict):
        pairs = [(f"{path}.{key}", value, here[key]) for key, value in there.items()]
    elif isinstance(there, (list, tuple)):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(there, here, strict=True))]
    else:
        return _compare(there, here, exact, path)
    return [found for where, a, b in pairs for found in find_differences(a, b, exact, where)]


def _compare(there: Any, here: Any, exact: bool, path: str) -> list[str]:
    if isinstance(there, (str, bool, int)) or there is None:
        return [] if there == here else [f"{path}: {there} != {here}"]
    a, b = np.asarray(there), np.asarray(here)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return [f"{path}: {a.dtype}{a.shape} != {b.dtype}{b.shape}"]
    if exact:
        return [] if a.tobytes() == b.tobytes() else [f"{path}: other bits: {a} != {b}"]
    return [] if np.allclose(a, b, 1e-5, 1e-5) else [f"{path}: {a} != {b}"]
