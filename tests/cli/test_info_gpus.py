"""What `jaxdist info` says of GPUs, from recorded output of `nvidia-smi`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxdist.cli._info import show as _info
from jaxdist.cli._info.gpus import count_links, list_gpu_facts, list_gpu_settings, run_command

SUMMARY = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.15              Driver Version: 570.86.15      CUDA Version: 12.8     |
"""
FOUR = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-51\t0
GPU1\tNV18\t X \tNV18\tSYS\tPIX\t0-51\t0
GPU2\tNV18\tNV18\t X \tPHB\tSYS\t52-103\t1
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t52-103\t1
NIC0\tPIX\tPIX\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\tN/A\n"


def _answer(command: Sequence[str]) -> str:
    return FOUR if "topo" in command else SUMMARY


def test_pairs_of_gpus_are_counted_by_their_link() -> None:
    assert count_links(FOUR) == {"NV18": 3, "SYS": 2, "PHB": 1}
    assert count_links(ONE) == count_links("") == {}


def test_driver_links_memory_and_network_cards_are_listed(tmp_path: Path) -> None:
    for card, rate in (("mlx5_0", "400 Gb/sec (4X NDR)"), ("mlx5_1", "200 Gb/sec (4X HDR)")):
        port = tmp_path / "sys" / "class" / "infiniband" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
    rows = dict(list_gpu_facts("PJRT C API\ncuda 12090", {}, _answer, tmp_path))
    assert rows == {
        "driver": "570.86.15",
        "CUDA of the driver": "12.8",
        "CUDA of JAX": "PJRT C API cuda 12090",
        "share of the memory for JAX": "0.75 (JAX's default)",
        "links of the GPUs": "3 pairs by 18 NVLinks, 2 pairs by the link between CPUs, "
        "1 pairs by the PCIe of one CPU",
        "network card mlx5_0": "400 Gb/sec (4X NDR)",
        "network card mlx5_1": "200 Gb/sec (4X HDR)",
    }


def test_a_system_that_tells_nothing_is_said_to(tmp_path: Path) -> None:
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    rows = dict(list_gpu_facts("", given, lambda command: "", tmp_path))
    assert rows["driver"] == "not reported by nvidia-smi"
    assert rows["CUDA of JAX"] == "not reported by JAX"
    assert rows["share of the memory for JAX"] == "taken as it is needed, up to .5"
    assert rows["network"] == "no InfiniBand or RoCE card is listed"


def test_commands_that_are_missing_or_fail_give_nothing() -> None:
    assert run_command(["no-such-command-of-any-system"]) == ""
    assert run_command([sys.executable, "-c", "print(1); raise SystemExit(3)"]) == ""
    assert run_command([sys.executable, "-c", "print('yes')"]) == "yes\n"


def test_recommended_settings_are_shown_beside_what_is_set() -> None:
    environment = {
        "NCCL_NVLS_ENABLE": "0",
        "XLA_FLAGS": "--xla_gpu_all_gather_combine_threshold_bytes=5",
    }
    rows = {row[0]: row for row in list_gpu_settings("NVIDIA H100 80GB HBM3", environment)}
    assert rows["NCCL_NVLS_ENABLE"][1:4] == ("1", "0", "any")
    of_layers = rows["--xla_gpu_all_gather_combine_threshold_bytes"]
    assert of_layers[1:4] == ("8589934592", "5", "fsdp")
    assert rows["CUDA_DEVICE_MAX_CONNECTIONS"][2] == "unset"
    assert all("https://" in row[4] for row in rows.values())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in {
        row[0] for row in list_gpu_settings("NVIDIA B200", {})
    }
    unknown = {row[0] for row in list_gpu_settings("NVIDIA GeForce RTX 4090", {})}
    assert "JAX_OPTIMIZATION_LEVEL" in unknown
    assert "NCCL_NVLS_ENABLE" not in unknown


def test_info_has_the_tables_only_where_jax_has_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(_info._list_gpus())

    class Client:
        platform_version = "cuda 12090"

    class Gpu:
        client = Client()
        device_kind = "NVIDIA H200"

    gpu: Any = Gpu()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    titles = [table.title for table in _info._list_gpus()]
    assert titles[0] == "GPUs"
    assert "config.gpu_flags" in str(titles[1])
