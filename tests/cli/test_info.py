"""`jaxdist info`."""

import dataclasses
import io
import sys
from typing import Any

import jax
import pytest
from rich.console import Console

from jaxdist.cli._info.show import describe_device_memory, get_host_memory_bytes, show_info
from jaxdist.training import EXTRAS


@dataclasses.dataclass(frozen=True)
class _Device:
    """What `describe_device_memory` looks at."""

    platform: str
    stats: dict[str, Any] | None
    process_index: int = 0

    def memory_stats(self) -> dict[str, Any] | None:
        return self.stats


def _shown(width: int = 200) -> str:
    out = io.StringIO()
    assert show_info(Console(file=out, width=width)) == 0
    return out.getvalue()


def test_info_shows_versions_devices_topology_and_memory() -> None:
    shown = _shown()
    assert jax.__version__ in shown
    for number in range(8):
        assert str(jax.devices()[number]) in shown
    assert "1 (this is 0)" in shown
    assert "8, 8 of this process" in shown
    assert "GiB" in shown


@pytest.mark.parametrize("width", [80, 200])
def test_info_shows_every_extra_with_the_whole_install_command_in_one_line(width: int) -> None:
    lines = _shown(width).splitlines()
    for extra in EXTRAS:
        assert any(extra.install_command in line for line in lines), extra.name


def test_info_says_which_extras_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    [line] = [line for line in _shown().splitlines() if "install scikit-learn" in line]
    assert "no" in line.split("│")[3]


def test_memory_is_that_of_the_device_where_the_backend_tells() -> None:
    stats = {"bytes_limit": 16 * 2**30, "bytes_in_use": 2**29}
    device: Any = _Device("gpu", stats)
    assert describe_device_memory(device) == "16.0 GiB, 0.5 GiB in use"


def test_memory_is_that_of_the_host_on_cpu_and_unknown_elsewhere() -> None:
    cpu: Any = _Device("cpu", None)
    tpu: Any = _Device("tpu", {})
    far: Any = _Device("tpu", {"bytes_limit": 1}, process_index=3)
    assert "shares the host's" in describe_device_memory(cpu)
    assert (
        describe_device_memory(tpu) == describe_device_memory(far) == "not reported by the backend"
    )
    total = get_host_memory_bytes()
    assert total is None or total > 2**20
