"""A network that is cut for a while: who goes on, and how the others end.

`docs/machines/several-hosts.md` has the table.
"""

import pathlib
import signal
import time

import pytest

from tests.hosts.cuts import add_before_and_after
from tests.hosts.hosts import make_hosts, needs_hosts
from tests.processes.job import start_job
from tests.tables import sampled

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

GOES_ON, ENDS = "goes on", "ends"
# Seconds of the cut, heartbeat_seconds, and what process 1 may do.
ROWS = [
    (4, 10, {GOES_ON}),
    (12, 10, {ENDS}),
    (30, 10, {ENDS}),
    (4, 60, {GOES_ON}),
    (12, 60, {GOES_ON}),
    # It depends on whether a call of JAX's service is under way when gRPC closes the connection.
    (30, 60, {GOES_ON, ENDS}),
]
TRIES = 3


def _name(row: tuple[tuple[int, int, set[str]], int]) -> str:
    (seconds, heartbeat, _), number = row
    return f"{seconds} s, heartbeat {heartbeat}, {number}"


@pytest.mark.parametrize(
    "row", sampled([(row, n) for row in ROWS for n in range(TRIES)], 1, name=_name)
)
def test_a_cut_network_ends_the_process_behind_it_or_the_job_goes_on(
    tmp_path: pathlib.Path, row: tuple[tuple[int, int, set[str]], int]
) -> None:
    (seconds, heartbeat, allowed), _ = row
    env = {
        "JAXDIST_COLLECTIVE_SECONDS": "30",
        "JAXDIST_JOIN_SECONDS": "60",
        "JAXDIST_HEARTBEAT_SECONDS": str(heartbeat),
    }
    with make_hosts(2) as hosts:
        addresses = [f"{host.address}:2222" for host in hosts]
        holders = [host.holder for host in hosts]
        args = (str(tmp_path),)
        how = {"args": args, "env": env, "holders": holders, "addresses": addresses}
        with start_job(add_before_and_after, 2, **how) as job:
            for index in range(2):
                job.wait_for_line(index, "ready", timeout=60)
            hosts[1].cut()
            # The length of the cut is what is tried.
            time.sleep(seconds)
            hosts[1].mend()
            (tmp_path / "mended").touch()
            here, there = job.wait(90)
    assert not here.timed_out, here.describe()
    assert here.exit_code == 0, here.describe()
    found = GOES_ON if there.exit_code == 0 else ENDS
    assert found in allowed, there.describe()
    if found == GOES_ON:
        for outcome in (here, there):
            assert outcome.result == {"sums": [3.0, 3.0], "error": None, "processes": ()}
    else:
        assert there.exit_code == -signal.SIGABRT, there.describe()
        assert here.result == {"sums": [3.0], "error": "UnavailableError", "processes": (1,)}
