"""A load has one large array on the host at a time, beside the slices of the process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_a_load_needs_its_own_slices_and_at_most_one_more_array(
    dim: int, tmp_path: pathlib.Path
) -> None:
    script = pathlib.Path(__file__).with_name("memory_script.py")
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "x.safetensors"), str(dim)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["largest"] == 1 << 27
    assert found["grown"] <= found["own"] + 1.2 * found["largest"], found
