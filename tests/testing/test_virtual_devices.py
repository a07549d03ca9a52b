"""Virtual CPU devices; each test uses a new process, since JAX starts only once in a process."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxdist.errors import ArgumentError, ArgumentTypeError
from jaxdist.testing import virtual_devices

REFUSED = """
try:
    virtual_devices({count})
except BackendStartedError as error:
    print(error)
else:
    raise SystemExit("virtual_devices({count}) was not refused")
"""


def _run(program: str, **environment: str) -> str:
    """Return what `program` prints in a new process."""
    imports = (
        "import jax, jaxdist\n"
        "from jaxdist.errors import BackendStartedError\n"
        "from jaxdist.testing import virtual_devices\n"
    )
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", imports + program],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_virtual_devices_before_jax_starts_gives_that_many() -> None:
    assert _run("virtual_devices(5)\nprint(len(jax.devices()))") == "5\n"


def test_virtual_devices_may_be_asked_for_again_before_and_after_the_start() -> None:
    program = "virtual_devices(5); virtual_devices(3); n = len(jax.devices()); virtual_devices(3)"
    assert _run(program + "\nprint(n)") == "3\n"


def test_importing_jaxdist_does_not_start_jax() -> None:
    assert _run("import jaxdist.cli\nvirtual_devices(2)\nprint(len(jax.devices()))") == "2\n"


def test_virtual_devices_after_the_start_says_how_many_there_are_and_what_to_do() -> None:
    message = _run("virtual_devices(2); jax.devices()" + REFUSED.format(count=4))
    assert "virtual_devices(4)" in message
    assert "2 CPU device(s)" in message
    assert "first thing" in message
    assert "restart the runtime" in message
    assert "XLA_FLAGS" not in message


def test_refused_virtual_devices_leave_the_devices_as_they_were() -> None:
    program = "virtual_devices(2); jax.devices()" + REFUSED.format(count=4) + "print(jax.devices())"
    assert _run(program).count("CpuDevice") == 2


def test_virtual_devices_equal_to_what_jax_started_with_by_itself_are_accepted() -> None:
    assert _run("n = len(jax.devices()); virtual_devices(n)\nprint(n)") == "1\n"


def test_virtual_devices_after_a_start_under_xla_flags_name_the_flag() -> None:
    flag = "--xla_force_host_platform_device_count=3"
    started = "print(len(jax.devices())); virtual_devices(3)"
    message = _run(started + REFUSED.format(count=4), XLA_FLAGS=flag)
    assert message.startswith("3\n")
    assert flag in message


def test_virtual_devices_win_over_xla_flags_before_the_start() -> None:
    flag = "--xla_force_host_platform_device_count=3"
    assert _run("virtual_devices(4)\nprint(len(jax.devices()))", XLA_FLAGS=flag) == "4\n"


@pytest.mark.parametrize("count", [0, -1])
def test_virtual_devices_below_one_are_refused_with_the_number(count: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"virtual_devices was given count={count}\."):
        virtual_devices(count)


@pytest.mark.parametrize("count", ["8", 8.0, True, None, np.float32(8)], ids=repr)
def test_virtual_devices_that_are_no_int_are_refused_with_value_and_type(count: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=type(count).__name__):
        virtual_devices(count)
