"""What 2 processes with 2 devices have saved is restored by any number of processes and devices."""

import pathlib
from typing import Any

import numpy as np
import pytest

import jaxdist
from tests.checkpoints.processes import states
from tests.processes.job import results_of_job


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    """The folder of checkpoints that 2 processes have written, and the values in them."""
    folder = tmp_path_factory.mktemp("saved")
    first, second = results_of_job(states.save_all, 2, args=(str(folder),), devices=2)
    for kind in states.KINDS:
        _compare(first[kind], second[kind], exactly=True)
    return folder, first


def _compare(found: list[np.ndarray], wanted: list[np.ndarray], *, exactly: bool) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if exactly:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", states.KINDS)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_one_process_restores_bit_for_bit_what_two_have_saved(
    saved: tuple[pathlib.Path, dict[str, Any]], devices: int, kind: str
) -> None:
    folder, values = saved
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    found, trained = states.restore(strategy, kind, str(folder / kind))
    # The shares of a sum on each replica are added up again.
    _compare(found, values[kind], exactly=kind != "variables")
    if kind != "variables":
        again = states.train(strategy, kind, states.make_state(strategy, kind), 3)
        oracle = states.read(kind, states.train(strategy, kind, again, 2))
        _compare(trained, oracle, exactly=False)


@pytest.mark.parametrize(("count", "devices"), [(2, 2), (2, 1), (4, 1)])
def test_other_numbers_of_processes_restore_what_two_have_saved(
    saved: tuple[pathlib.Path, dict[str, Any]], count: int, devices: int
) -> None:
    folder, values = saved
    for result in results_of_job(states.restore_all, count, args=(str(folder),), devices=devices):
        for kind in states.KINDS:
            _compare(result[kind][0], values[kind], exactly=kind != "variables")


def test_what_one_process_has_saved_is_restored_by_two(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(8)])
    values = {k: states.save(strategy, k, str(tmp_path / k)) for k in states.KINDS}
    for result in results_of_job(states.restore_all, 2, args=(str(tmp_path),), devices=2):
        for kind in states.KINDS:
            _compare(result[kind][0], values[kind], exactly=kind != "variables")


def test_each_process_writes_its_own_shards_and_their_checksums(
    saved: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    folder = saved[0] / "fsdp" / "3"
    assert sorted(p.name for p in (folder / "leaves").iterdir()) == [
        "process_0.json",
        "process_1.json",
    ]
    for index in (0, 1):
        written = [*(folder / "state" / f"ocdbt.process_{index}" / "d").iterdir()]
        assert sum(p.stat().st_size for p in written) > 0
