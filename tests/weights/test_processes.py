"""Weights of a model whose arrays are parts of several processes."""

import pathlib

import numpy as np
import pytest

from jaxdist import training
from tests.processes.job import results_of_job
from tests.weights import loading


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_reads_its_own_slices_and_one_writes(
    processes: int, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "net.safetensors"
    training.export_weights(loading.Net(3), path)
    found = results_of_job(loading.round_trip, processes, args=(str(tmp_path),), devices=2)
    assert all(result["exists"] for result in found)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    size = path.stat().st_size
    for result in found:
        # Pieces, the header, and gaps between columns.
        assert result["read"] <= size / processes * 1.05 + 4096, (result, size)


def test_an_error_of_one_process_is_one_of_all(tmp_path: pathlib.Path) -> None:
    training.export_weights(loading.Net(3), tmp_path / "net.safetensors")
    found = results_of_job(loading.round_trip_of_parts, 2, args=(str(tmp_path),), devices=2)
    for process, result in enumerate(found):
        load, like, write = result["errors"]
        assert result["same"]
        for text in (load, like):
            other = "which has no weights" if process == 1 else "process 1 has failed"
            assert other in text
        assert ("cannot write" if process == 0 else "process 0 has failed") in write


def test_a_number_that_does_not_fit_stops_no_process(tmp_path: pathlib.Path) -> None:
    like = {name: np.zeros((8, 2), np.float16) for name in "abc"}
    training.export_weights(like, tmp_path / "like.safetensors")
    found = results_of_job(loading.export_a_number_too_large, 2, args=(str(tmp_path),), devices=2)
    assert all("cannot be converted from float32 to float16" in x["error"] for x in found)
    assert not (tmp_path / "x.safetensors").exists()
