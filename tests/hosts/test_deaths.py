"""A process on another host that ends, stops or is cut off: the outcome, within its bound.

`docs/machines/several-hosts.md` has the table.
"""

from typing import Any

import pytest

from tests.hosts.deaths import wait
from tests.hosts.hosts import make_hosts, needs_hosts
from tests.processes.job import start_job
from tests.tables import sampled

# Tests with hosts wait for each other.
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

PLACES = ("a new program", "a known program", "reduce", "gather")
ENDED = ("SIGKILL", "exit 0")
COLLECTIVE_SECONDS = 20.0
ROWS = [(p, f) for p in PLACES for f in (*ENDED, "SIGSTOP", "a cut link", "a host that is gone")]


def _name(row: tuple[str, str]) -> str:
    return f"{row[0]}, {row[1]}"


@pytest.mark.parametrize("row", sampled(ROWS, 4, name=_name))
def test_the_process_that_waits_says_who_is_missing_within_the_bound(row: Any) -> None:
    _, fault = row
    with make_hosts(2) as hosts:
        env = {"JAXDIST_COLLECTIVE_SECONDS": str(COLLECTIVE_SECONDS)}
        addresses = [f"{host.address}:2222" for host in hosts]
        holders = [host.holder for host in hosts]
        with start_job(wait, 2, args=row, env=env, holders=holders, addresses=addresses) as job:
            if fault in ("a cut link", "a host that is gone"):
                job.wait_for_line(1, "ready", timeout=60)
                hosts[1].cut()
            if fault == "a host that is gone":
                job.kill(1)
            job.wait_for_end(0, 100)
            job.kill(1)
            first, _ = job.wait(20)
    assert first.exit_code == 0, first.describe()
    result = first.result
    assert result["processes"] == (1,), result
    if fault in ENDED:
        assert result["error"] == "UnavailableError", result
        # Three seconds without news, and the looks of both sides.
        assert result["seconds"] < 12, result
    else:
        # It may live, as far as process 0 can know.
        assert result["error"] in ("DeadlineExceededError", "UnavailableError"), result
        assert result["seconds"] < COLLECTIVE_SECONDS + 15, result
