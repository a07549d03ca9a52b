"""Random programs give on replicas, in both executors, what plain JAX gives on one device.

A failure prints the program; `python -c 'from tests.program.one_device.sources import program_of;
print(program_of(7))'` does, too.
"""

import collections
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from tests.program.one_device import compare, meanings, models, statements
from tests.program.one_device.sources import Program, program_of
from tests.tables import sampled

PROGRAMS = int(os.environ.get("JAXDIST_PROGRAMS", "1000"))


@pytest.fixture(autouse=True)
def _settings() -> Any:
    with meanings.settings():
        yield


@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
@pytest.mark.parametrize("number", sampled(range(PROGRAMS), 2))
def test_program_has_the_numbers_of_one_device(number: int) -> None:
    compare.check(program_of(number))


def test_a_number_is_always_the_same_program() -> None:
    first = [str(program_of(i)) for i in range(20)]
    assert first == [str(program_of(i)) for i in range(20)]
    assert len(set(first)) == 20


def test_the_programs_have_everything_in_them() -> None:
    found = collections.Counter(f for i in range(1000) for f in program_of(i).features)
    tables = {
        "row": statements.OF_A_ROW,
        "over": statements.OVER_ROWS,
        "equal": statements.OF_EQUAL,
        "model": models.PYTREES,
        "module": models.MODULES,
        "loss": models.LOSSES,
        "optimizer": {**models.ELEMENTWISE, **models.NOT_ELEMENTWISE},
        "gradient": models.GRADIENTS,
        "second": models.SECOND_ORDER,
    }
    wanted = {f"{what} {name}": 4 for what, table in tables.items() for name in table}
    wanted |= dict.fromkeys(("whole", "zero", "fsdp", "bfloat16", "pytree", "module", "rows"), 50)
    wanted |= dict.fromkeys(("hsdp", "grid", "virtual", "two axes", "loss regularized"), 30)
    missing = {name: found[name] for name, least in wanted.items() if found[name] < least}
    assert not missing, f"too few of {missing}"


def test_uneven_rows_and_replicas_without_rows_are_drawn() -> None:
    programs = [program_of(i) for i in range(1000)]
    assert sum(not p.is_even for p in programs) > 150
    assert sum(p.has_empty_replica for p in programs) > 50


def _first(**wanted: object) -> Program:
    programs = map(program_of, range(1000))
    return next(p for p in programs if all(getattr(p, k) == v for k, v in wanted.items()))


def test_a_mean_in_the_place_of_a_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(self: Any, tree: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("mean", tree)

    monkeypatch.setattr(meanings.OnReplicas, "sum", mean)
    with pytest.raises(AssertionError, match=r"on replicas|off by|differs"):
        compare.check(_first(kind="rows", strategy="mirrored", rows=(3, 3)))


@pytest.mark.parametrize("by", [1e-3, float("nan"), float("inf")])
def test_one_wrong_entry_is_found(by: float) -> None:
    program = _first(kind="rows", dtype="float32")
    one = compare.arrays_of(meanings.on_one_device(program))
    assert compare.differences(program, one, one) == {}
    for name, array in one.items():
        if np.issubdtype(array.dtype, np.floating) and np.isfinite(array).all():
            wrong = array.copy()
            wrong.reshape(-1)[-1] += by * np.abs(array).max()
            assert list(compare.differences(program, one, {**one, name: wrong})) == [name]
            return
    pytest.fail("no array of this program is finite")


def test_steps_of_bfloat16_are_those_at_the_largest_entry() -> None:
    assert compare.tolerance(np.asarray([1.0, -3.0], np.float32), "float32") == pytest.approx(3e-5)
    bfloat16 = jnp.bfloat16
    assert compare.tolerance(np.asarray([0.5, -1.5], bfloat16), "bfloat16") == 2 * 2.0**-7
    assert compare.tolerance(np.asarray([0.0], bfloat16), "bfloat16") == 0
    assert compare.tolerance(np.asarray([3]), "float32") == 0
