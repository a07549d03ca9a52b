"""What the processes of a job run for the tests of `MultiWorkerMirroredStrategy`."""

import json
import os
import traceback
from typing import Any

import jaxdist
from tests.strategies.multi_worker.cases import CASES


def run_cases(names: list[str] | None = None) -> dict[str, Any]:
    """Run cases in this process of a job, and return their results or errors."""
    names = json.loads(os.environ["CASES"]) if names is None else names
    how = json.loads(os.environ.get("HOW", "{}"))
    strategy = jaxdist.MultiWorkerMirroredStrategy(**how)
    return run_with(strategy, names)


def run_with(strategy: jaxdist.Strategy, names: list[str]) -> dict[str, Any]:
    """Run cases with a strategy."""
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = CASES[name](strategy)
        except Exception:
            results[name] = f"error: {traceback.format_exc()}"
            if os.environ.get("STOP"):
                break
    return results
