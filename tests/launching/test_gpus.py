"""Which GPUs each process gets."""

import pathlib

import pytest

from jaxdist._called import called
from jaxdist._launching import gpus
from jaxdist._launching.gpus import divide_gpus, find_device_files
from jaxdist.errors import LaunchError
from tests.strategies.oracle import refused

FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("count", "each", "environment", "expected"),
    [
        (4, 1, {}, ["0", "1", "2", "3"]),
        (2, 2, {}, ["0,1", "2,3"]),
        (3, 1, {}, ["0", "1", "2"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-9b,GPU-7c"}, ["GPU-8a", "GPU-9b"]),
        (9, 1, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        (2, 1, {"JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
        (9, 1, {"JAX_PLATFORMS": "cpu"}, None),
        (9, 1, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (9, 1, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
@called("jaxdist launch")
def test_each_process_gets_gpus_of_its_own(
    count: int, each: int, environment: dict[str, str], expected: list[str] | None
) -> None:
    assert divide_gpus(count, each, environment, lambda: FOUR) == expected


@called("jaxdist launch")
def test_without_gpus_nothing_is_set() -> None:
    assert divide_gpus(9, 1, {}, list) is None
    # A job of another machine's variables.
    assert divide_gpus(9, 1, {"CUDA_VISIBLE_DEVICES": "0"}, list) is None


@called("jaxdist launch")
def test_too_few_gpus_are_an_error_before_anything_starts() -> None:
    with refused(LaunchError, "5 GPUs for 5 processes, and there are 4", "Start 4", "=cpu"):
        divide_gpus(5, 1, {}, lambda: FOUR)
    with refused(LaunchError, "there are 1 in CUDA_VISIBLE_DEVICES=2", "Start 1 process"):
        divide_gpus(2, 1, {"CUDA_VISIBLE_DEVICES": "2"}, lambda: FOUR)
    # CUDA shows no GPU after an entry that names none.
    with refused(LaunchError, "there are 2 in CUDA_VISIBLE_DEVICES=MIG-1,2,-1,3", "Start 2"):
        divide_gpus(3, 1, {"CUDA_VISIBLE_DEVICES": "MIG-1,2,-1,3"}, lambda: FOUR)
    with refused(LaunchError, "8 GPUs for 1 processes", "Request 4 device(s) in one process"):
        divide_gpus(1, 8, {}, lambda: FOUR)


def test_gpus_are_counted_by_their_device_files(tmp_path: pathlib.Path) -> None:
    for name in ("nvidia3", "nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert find_device_files(tmp_path) == ["0", "1"]


def test_the_driver_is_asked_where_there_are_no_device_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "find_device_files", lambda _: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "_PLUGINS", ("jax",))
    assert gpus.list_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho 'GPU 1: H200'\n")
    program.chmod(0o755)
    assert gpus.list_gpus() == ["0", "1"]
    program.write_text("no program")
    assert gpus.list_gpus() == []
    # JAX cannot use GPUs without its plugin.
    monkeypatch.setattr(gpus, "_PLUGINS", ("jax_cuda0_plugin",))
    assert gpus.list_gpus() == []
