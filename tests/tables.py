"""Tables and fuzzes of two lengths: a fixed sample in the ordinary run, all with `--long`."""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def sampled(rows: Sequence[Any], ordinary: int, *, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters for all `rows`, of which all but a fixed sample of `ordinary` are marked `long`.

    The sample depends on the names of the rows only, so a new row does not change the others.
    """
    ranked = sorted(rows, key=lambda row: random.Random(name(row)).random())
    always = {name(row) for row in ranked[:ordinary]}
    return [
        pytest.param(row, id=name(row), marks=() if name(row) in always else pytest.mark.long)
        for row in rows
    ]


def examples(ordinary: int, long: int) -> int:
    """How many random examples a test tries: `ordinary`, or `long` with `--long`."""
    return long if os.environ.get("JAXDIST_TEST_LONG") == "1" else ordinary
