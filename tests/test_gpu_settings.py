"""`config.gpu_flags`: the settings, their sources, and that XLA knows the flags."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

import jaxdist
from jaxdist.errors import ArgumentError, ArgumentTypeError

CHIPS = ("a100", "h100", "h200", "b200", "gb200")
TRAININGS = ("data_parallel", "fsdp")


def _every() -> dict[tuple[str, str], Any]:
    return {(t, c): jaxdist.config.gpu_flags(t, chip=c) for t in TRAININGS for c in CHIPS}


def test_the_settings_of_a_generation_are_those_of_its_sources() -> None:
    hopper = jaxdist.config.gpu_flags("fsdp", chip="h200")
    assert hopper["CUDA_DEVICE_MAX_CONNECTIONS"] == hopper["NCCL_NVLS_ENABLE"] == "1"
    blackwell = jaxdist.config.gpu_flags("fsdp", chip="gb200")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in blackwell
    assert "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL" in blackwell["XLA_FLAGS"].split()
    ampere = jaxdist.config.gpu_flags("fsdp", chip="a100")
    assert not {"CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE"} & ampere.keys()


def test_sizes_of_layers_and_gradients_are_the_thresholds() -> None:
    of_layers = jaxdist.config.gpu_flags("fsdp", layer_bytes=436_000_000)["XLA_FLAGS"].split()
    assert of_layers == [
        "--xla_gpu_all_gather_combine_threshold_bytes=436000000",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=436000000",
    ]
    of_all = jaxdist.config.gpu_flags("data_parallel", gradient_bytes=16_000_000)["XLA_FLAGS"]
    assert of_all == "--xla_gpu_all_reduce_combine_threshold_bytes=16000000"


def test_every_setting_says_when_it_helps_and_who_says_so() -> None:
    for flags in _every().values():
        said = flags.explain()
        for setting in flags.settings:
            assert setting.helps in said
            assert setting.source.startswith("https://")


@pytest.mark.parametrize("training", TRAININGS)
def test_the_xla_of_this_jax_knows_every_flag(training: str) -> None:
    # XLA ends a process that has a flag which it does not know.
    every = {
        f for (t, _), made in _every().items() for f in made["XLA_FLAGS"].split() if t == training
    }
    done = _start({**os.environ, "XLA_FLAGS": " ".join(sorted(every))})
    assert done.returncode == 0, done.stderr
    assert _start({**os.environ, "XLA_FLAGS": "--xla_gpu_no_such_flag=1"}).returncode != 0


def _start(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = "import jax; jax.devices()"
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_OPTIMIZATION_LEVEL": "O1"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_shell_reads_the_lines_and_keeps_the_flags_that_were_there() -> None:
    flags = jaxdist.config.gpu_flags("fsdp", chip="b200")
    shown = subprocess.run(
        ["bash", "-c", flags.to_shell() + "\nenv"],
        env={"XLA_FLAGS": "--mine=1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    for name, value in flags.items():
        wanted = f"--mine=1 {value}" if name == "XLA_FLAGS" else value
        assert found[name] == wanted


def test_nothing_is_set_by_asking() -> None:
    before = dict(os.environ)
    _every()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"training": "model"}, ArgumentError, "'data_parallel', 'fsdp'"),
        ({"training": 3}, ArgumentError, "training=3"),
        ({"training": "fsdp", "chip": "v100"}, ArgumentError, "a100, h100, h200, b200, gb200"),
        ({"training": "fsdp", "chip": ["h100"]}, ArgumentError, "chip=['h100']"),
        ({"training": "fsdp", "gradient_bytes": 5}, ArgumentError, "Remove gradient_bytes"),
        ({"training": "data_parallel", "layer_bytes": 5}, ArgumentError, "Remove layer_bytes"),
        ({"training": "fsdp", "layer_bytes": 0}, ArgumentError, "layer_bytes=0"),
        ({"training": "fsdp", "layer_bytes": 1.5}, ArgumentTypeError, "layer_bytes=1.5"),
    ],
)
def test_unknown_kinds_chips_and_sizes_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        jaxdist.config.gpu_flags(**given)
