"""Every dtype of JAX comes back from a checkpoint with the bits that were saved."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdist.errors import ArgumentTypeError, CheckpointError
from jaxdist.training import Checkpoints
from tests.checkpoints import bits
from tests.processes.job import results_of_job
from tests.strategies.oracle import refused

_LAYOUTS: dict[str, tuple[Any, ...]] = {"rows": ("a",), "columns": (None, "a"), "whole": ()}


def _layout(name: str) -> jax.NamedSharding:
    return jax.NamedSharding(jax.make_mesh((4,), ("a",)), jax.P(*_LAYOUTS[name]))


@pytest.mark.parametrize("wanted", _LAYOUTS)
@pytest.mark.parametrize("saved", _LAYOUTS)
def test_all_bit_patterns_of_all_dtypes_come_back_in_any_layout(
    tmp_path: Path, saved: str, wanted: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, bits.make_state(_layout(saved)))
        restored = checkpoints.restore(bits.make_empty(_layout(wanted)))
    assert restored is not None
    for name in bits.DTYPES:
        assert restored.state[name].sharding == _layout(wanted)
        bits.assert_equal_bits(name, restored.state[name])


def test_arrays_of_numpy_and_single_numbers_come_back(tmp_path: Path) -> None:
    state = {name: bits.make_patterns(name) for name in bits.DTYPES}
    single = {f"{name}_single": array[1, 1] for name, array in state.items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state | single)
        restored = checkpoints.restore(1, like=state | single)
    for name in bits.DTYPES:
        bits.assert_equal_bits(name, restored.state[name])
        found, wanted = restored.state[f"{name}_single"], single[f"{name}_single"]
        assert (found.shape, found.dtype) == ((), wanted.dtype)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_the_records_have_the_dtypes_of_the_arrays(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, bits.make_state(_layout("rows")))
        file = checkpoints.path(1) / "leaves" / "process_0.json"
        checkpoints.wait_until_finished()
        leaves = json.loads(file.read_bytes())["leaves"]
    assert {name: leaf["dtype"] for name, leaf in leaves.items()} == {n: n for n in bits.DTYPES}


@pytest.mark.parametrize("dtype", bits.DTYPES)
def test_another_dtype_is_an_error_that_names_both(tmp_path: Path, dtype: str) -> None:
    other = "uint8" if dtype != "int8" else "uint4"
    rows = bits.make_patterns(dtype)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": rows})
        found = rf"(?s)w: saved {dtype}\[8, \d+\], wanted {other}\[8, \d+\]"
        with pytest.raises(CheckpointError, match=found):
            checkpoints.restore({"w": np.zeros(rows.shape, jnp.dtype(other))})


def test_bits_that_a_dtype_does_not_use_are_no_damage(tmp_path: Path) -> None:
    # The low four bits are 1 and -1.
    state = {"w": np.array([0xF1, 0x3F], np.uint8).view(ml_dtypes.int4)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state)
    assert restored is not None
    assert restored.state["w"].astype("int32").tolist() == [1, -1]


_NOT_OF_JAX: dict[str, tuple[Any, str]] = {
    "long double": (np.ones(3, np.longdouble), r"float128.*up to 64 bits.*astype\('float64'\)"),
    "long complex": (np.ones(3, np.clongdouble), r"complex256.*astype\('complex128'\)"),
    "byte order": (np.ones(3, ">f4"), r">f4.*byte order of the machine.*astype\('float32'\)"),
    "integers in another byte order": (np.ones(3, ">i2"), r">i2.*astype\('int16'\)"),
    "fields": (np.ones(3, [("a", "f4")]), r"the fields \['a'\].*a dict of arrays"),
    "bytes": (np.zeros(3, "V3"), r"dtype \|V3.*Pass numbers instead"),
    "half complex": (np.zeros(3, ml_dtypes.complex32), r"complex32.*astype\('complex64'\)"),
    "one bit": (np.zeros(3, ml_dtypes.uint1), r"XLA makes no arrays of uint1.*astype\('int8'\)"),
    "six bits": (np.zeros(3, ml_dtypes.float6_e2m3fn), r"float6_e2m3fn.*astype\('float16'\)"),
}


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="no long double on this machine")
@pytest.mark.parametrize("kind", _NOT_OF_JAX)
def test_an_array_that_jax_does_not_have_is_refused_by_its_path(tmp_path: Path, kind: str) -> None:
    array, found = _NOT_OF_JAX[kind]
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match=rf"(?s)given state\['w'\], .*{found}"):
            checkpoints.save(1, {"w": array})
        assert checkpoints.steps() == ()


def test_strings_of_numpy_belong_into_the_notes(tmp_path: Path) -> None:
    strings = np.array(["a"], np.dtypes.StringDType())
    with refused(ArgumentTypeError, "state['w']", "notes"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": strings})


def test_two_processes_save_all_dtypes_and_one_restores_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    names = results_of_job(bits.save_and_restore, 2, args=(folder,), devices=2)
    assert names == [list(bits.DTYPES)] * 2
    host = {name: bits.make_patterns(name) for name in bits.DTYPES}
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore({"rows": bits.make_empty(_layout("columns")), "host": host})
    assert restored is not None
    for name in bits.DTYPES:
        bits.assert_equal_bits(name, restored.state["rows"][name])
        bits.assert_equal_bits(name, restored.state["host"][name])
