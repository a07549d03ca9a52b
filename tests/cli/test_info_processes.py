"""What `jaxdist info` says of jobs of several processes."""

import pytest

from jaxdist.cli._info.processes import list_settings


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
