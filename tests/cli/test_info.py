"""`jaxdist info`."""

import dataclasses
import io
import sys
from typing import Any

import jax
import pytest
from rich.console import Console

from jaxdist.cli._info.processes import list_settings
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


def _shown(width: int = 200, *, shows_all: bool = True) -> str:
    out = io.StringIO()
    assert show_info(Console(file=out, width=width), shows_all=shows_all) == 0
    return out.getvalue()


@pytest.mark.parametrize("shows_all", [False, True])
def test_info_shows_versions_devices_topology_and_memory(shows_all: bool) -> None:
    shown = _shown(shows_all=shows_all)
    assert jax.__version__ in shown
    named = jax.devices() if shows_all else [jax.devices()[0], jax.devices()[-1]]
    for device in named:
        assert str(device) in shown
    assert "1 (this is 0)" in shown
    assert "8, 8 of this process" in shown
    assert "GiB" in shown
    assert ("JAXDIST_QUIET_SECONDS" in shown) == shows_all


def test_info_fits_one_screen_of_80_columns() -> None:
    lines = _shown(80, shows_all=False).splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("shows_all", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_words_and_numbers_of_info_are_whole(width: int, shows_all: bool) -> None:
    shown, wide = _shown(width, shows_all=shows_all), _shown(400, shows_all=shows_all)
    assert max(map(len, shown.splitlines())) <= width
    # A wide screen wraps nothing. In the blocks of a narrow one, each cell but the first follows
    # the name of its column.
    missing = {w.strip(":,") for w in wide.split()} - {w.strip(":,") for w in shown.split()}
    assert missing <= {"setting"}


@pytest.mark.parametrize("width", [80, 200])
def test_info_shows_every_extra_with_the_whole_install_command_in_one_line(width: int) -> None:
    lines = _shown(width).splitlines()
    for extra in EXTRAS:
        assert any(extra.install_command in line for line in lines), extra.name


@pytest.mark.parametrize("shows_all", [False, True])
def test_info_says_which_extras_are_missing(
    shows_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    lines = _shown(shows_all=shows_all).splitlines()
    [line] = [line for line in lines if line.startswith("  scikit-learn ")]
    assert line.split()[1] == "no"
    assert any("pip install scikit-learn" in line for line in lines)


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


def test_flags_and_variables_of_this_process_are_shown() -> None:
    environment = {"XLA_FLAGS": "--a=1 --xla_cpu_collective_timeout_seconds=7"}
    rows = {row.name: row for row in list_settings("cpu", environment)}
    assert rows["--xla_cpu_collective_timeout_seconds"].now == "7"
    assert rows["JAXDIST_ABORT_SECONDS"].now == "never"
    assert "NCCL_PROTO" not in rows


def test_what_only_users_set_for_gpus_is_shown_with_its_value() -> None:
    environment = {
        "NCCL_IB_DISABLE": "1",
        "XLA_FLAGS": "--xla_gpu_nccl_terminate_on_error=true",
    }
    rows = {row.name: row for row in list_settings("gpu", environment)}
    assert (rows["NCCL_IB_DISABLE"].now, rows["NCCL_IB_DISABLE"].who) == ("1", "you")
    assert rows["--xla_gpu_nccl_terminate_on_error"].now == "true"
    assert rows["NCCL_SOCKET_IFNAME"].now == "unset"
    assert rows["CUDA_VISIBLE_DEVICES"].who == "jaxdist launch"


def test_times_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_QUIET_SECONDS", "5")
    assert {row.name: row.now for row in list_settings("cpu", {})}["JAXDIST_QUIET_SECONDS"] == "5 s"
