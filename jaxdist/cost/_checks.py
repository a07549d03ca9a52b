"""Checks the arguments of `jaxdist.cost`."""

import math
import numbers
from typing import Any

from jaxdist._called import refuse, refuse_type
from jaxdist._validate import show

# Examples of times and factors. Every other argument is a number of bytes per second.
_EXAMPLES = {
    "alpha": "1e-6",
    "seconds": "1e-4",
    "scatter_gather": "1.0",
    "step_seconds": "5e-6",
    "small_step_seconds": "1e-6",
    "part": "0.8",
    "switch_part": "1.0",
}


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuse a value that is not a finite number above 0 (with `or_zero`, of 0 or more)."""
    rule = f"{name} is a finite number {'from 0 up' if or_zero else 'above 0'}."
    found = f"{name}={show(value)}."
    remedy = f"Pass for instance {name}={_EXAMPLES.get(name, '1e9')}."
    # A bool is a number in Python, but never meant as one here.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse_type(found, rule, remedy)
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise refuse(found, rule, remedy)
