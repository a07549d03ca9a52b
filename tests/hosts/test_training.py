"""The digits configuration on several hosts has the numbers of one process."""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.hosts.hosts import make_hosts, needs_hosts
from tests.hosts.training import train
from tests.processes.job import ROOT, results_of_job
from tests.tables import sampled

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = str(ROOT / "configs" / "digits_multi_worker.toml")
_IPV4, _OTHER, _IPV6 = "10.77.0.{}/24", "10.78.0.{}/24", "fd77::{}/64"
# Number of hosts, networks, which of them the cluster has, and how the hosts know their own names.
ROWS = [
    (count, networks, used, names)
    for count in (2, 3)
    for networks, used in (((_IPV4,), 0), ((_IPV4, _OTHER), 1), ((_IPV6,), 0))
    for names in ("as on Debian", "not at all")
]


def _name(row: Any) -> str:
    count, networks, used, names = row
    kind = "IPv6" if networks == (_IPV6,) else f"network {used + 1} of {len(networks)}"
    return f"{count} hosts, {kind}, own names {names}"


@pytest.mark.parametrize("row", sampled(ROWS, 1, name=_name))
def test_losses_are_those_of_one_process(tmp_path: pathlib.Path, row: Any) -> None:
    count, networks, used, names = row
    with make_hosts(count, networks) as hosts:
        for host in hosts:
            own = [f"127.0.1.1 {host.name}"] if names == "as on Debian" else []
            host.write_names(["127.0.0.1 localhost", *own])
        where = [host.addresses[used] for host in hosts]
        results = results_of_job(
            train,
            count,
            args=(CONFIG, str(tmp_path / "together")),
            holders=[host.holder for host in hosts],
            addresses=[f"[{a}]:2222" if ":" in a else f"{a}:2222" for a in where],
            timeout=280,
        )
    (alone,) = results_of_job(
        train, 1, args=(CONFIG, str(tmp_path / "alone")), env={"TF_CONFIG": None}, timeout=280
    )
    assert [code for code, _ in [*results, alone]] == [0] * (count + 1)
    losses, wanted = results[0][1], alone[1]
    assert len(losses) == 20
    # 128 rows do not divide by 3.
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
