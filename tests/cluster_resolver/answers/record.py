"""Compares resolvers with what TensorFlow 2.21 answered; the tables beside this file hold it."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from jaxdist.cluster_resolver import ClusterSpec
from jaxdist.errors import JaxdistError


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a table: what was asked, and what TensorFlow answered."""
    rows: list[dict[str, Any]] = json.loads(
        pathlib.Path(__file__).with_name(f"{name}.json").read_text()
    )
    return rows


def answer(ask: Callable[[], Any]) -> Any:
    """What a resolver answers, in the form of the tables; an error as the names of its classes."""
    try:
        found = ask()
    except JaxdistError as error:
        # What was found, the rule, and the remedy.
        has_three = str(error).count("\n\n") == 2
        return {"error": [kind.__name__ for kind in type(error).__mro__] if has_three else []}
    if isinstance(found, ClusterSpec):
        tasks = found.as_dict()
        lists = {
            job: t if isinstance(t, list) else {str(i): a for i, a in t.items()}
            for job, t in tasks.items()
        }
        return {"jobs": found.jobs, "dict": lists}
    return list(found) if isinstance(found, tuple) else found


def is_same(ours: Any, tensorflows: Any) -> bool:
    """Whether two answers are the same; an error may be of more classes than TensorFlow's."""
    if isinstance(tensorflows, dict) and "error" in tensorflows:
        return isinstance(ours, dict) and tensorflows["error"] in ours.get("error", ())
    return bool(ours == tensorflows)
