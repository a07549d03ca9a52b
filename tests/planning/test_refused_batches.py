"""A plan refuses rows that the step has no place for, and pictures that cannot be written."""

import os
import pathlib
import sys
from typing import Any

import jax
import pytest

import jaxdist
from jaxdist.errors import ArgumentError, MissingExtraError
from tests.strategies.oracle import refused


def rows(count: int) -> Any:
    """The shape of so many rows on all replicas together."""
    whole: Any = jax.ShapeDtypeStruct((count, 4), "float32")
    return jaxdist.PerReplica.of_global(whole)


def test_a_step_without_rows_has_no_global_batch() -> None:
    weights = jax.ShapeDtypeStruct((4, 4), "float32")
    program = jaxdist.MirroredStrategy().lower(lambda w: w * 2, (weights,))
    parts = "global_batch=16", "no per-replica input", "Leave global_batch out"
    with refused(ArgumentError, *parts):
        program.compile_for("v5e:2x2", global_batch=16)


def test_inputs_with_other_numbers_of_rows_have_no_common_batch() -> None:
    program = jaxdist.MirroredStrategy().lower(lambda x, y: x[:1] + y[:1], (rows(16), rows(8)))
    parts = "4 rows for each replica", "{'args[0]': 2, 'args[1]': 1}", "leave global_batch out"
    with refused(ArgumentError, *parts):
        program.compile_for("v5e:2x2", global_batch=16)


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(MissingExtraError, "matplotlib is needed", "pip install matplotlib"):
        jaxdist.explain(jaxdist.MirroredStrategy()).save_png(tmp_path / "plan.png")


def test_a_picture_in_a_folder_of_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    # Whoever runs the tests as root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    target = tmp_path / "plan.png"
    with refused(ArgumentError, str(target), "may not write", "another folder"):
        jaxdist.explain(jaxdist.MirroredStrategy()).save_png(target)
