"""What a checkpoint cannot keep apart or read again is refused when it is saved."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.errors import ArgumentError, ArgumentTypeError
from jaxdist.training import Checkpoints

ONE, TWO = jnp.ones(2), jnp.zeros(2)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a.b": ONE, "a": {"b": TWO}}, "'a.b'"),
        ({"": ONE, "value": TWO}, "'value'"),
        ({"a.": {"b": ONE}, "a": {".b": TWO}}, "'a..b'"),
        ([{"0.x": ONE}, {"x": TWO}, {"0": {"x": ONE}, "0.x": TWO}], "'2.0.x'"),
    ],
    ids=["a dot", "an empty key", "dots at the end", "below a list"],
)
def test_two_leaves_of_one_name_are_refused_and_none_is_lost(
    tmp_path: Path, state: Any, name: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentError, match=name):
            checkpoints.save(1, state)
        checkpoints.save(1, {"a.b": ONE})
        with pytest.raises(ArgumentError, match="'a.b'"):
            checkpoints.restore({"a.b": ONE, "a": {"b": TWO}})


@pytest.mark.parametrize("kind", ["i2", "i4", "i8", "u4", "f2", "f4", "f8", "c8"])
def test_numbers_in_another_byte_order_are_refused_when_they_are_saved(
    tmp_path: Path, kind: str
) -> None:
    other = np.dtype(kind).newbyteorder("S")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match=r"newbyteorder\('='\)"):
            checkpoints.save(1, {"w": np.arange(3).astype(other)})
        native = np.arange(3).astype(kind)
        checkpoints.save(1, {"w": native})
        restored = checkpoints.restore({"w": native})
    assert restored is not None
    assert np.array_equal(restored.state["w"], native)


@pytest.mark.parametrize("kind", [[("x", "f4"), ("y", "i4")], "V3"])
def test_arrays_of_records_are_refused_when_they_are_saved(tmp_path: Path, kind: Any) -> None:
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ArgumentTypeError, match="an array of each field"),
    ):
        checkpoints.save(1, {"w": np.zeros(3, kind), "b": ONE})


def test_notes_whose_keys_are_one_string_in_json_are_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match="the same string in JSON"):
            checkpoints.save(1, {"w": ONE}, {"best": {1: 0.5, "1": 0.25}})
        checkpoints.save(1, {"w": ONE}, {"best": {1: 0.5, "2": 0.25}})
        restored = checkpoints.restore({"w": ONE})
    assert restored is not None
    assert restored.notes == {"best": {"1": 0.5, "2": 0.25}}
