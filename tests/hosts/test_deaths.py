"""A process on another host that ends, stops or is cut off: the outcome, within its bound.

`docs/machines/several-hosts.md` has the table.
"""

import pathlib
import signal
import time
from typing import Any

import pytest

from tests.hosts.deaths import wait
from tests.hosts.hosts import make_hosts, needs_hosts
from tests.processes.job import start_job
from tests.tables import sampled

# Tests with hosts wait for each other.
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

WAITS = ("a new program", "equal values", "a known program", "reduce", "gather", "save", "restore")
PLACES = ("join", *WAITS, "preemption", "the end")
ENDED = ("SIGKILL", "exit 0")
CUT = ("a cut link", "a host that is gone")
JOIN_SECONDS = 15.0
COLLECTIVE_SECONDS = 20.0
HEARTBEAT_SECONDS = 10.0
ROWS = [(place, fault) for place in PLACES for fault in (*ENDED, "SIGSTOP", *CUT)]


def _name(row: tuple[str, str]) -> str:
    return f"{row[0]}, {row[1]}"


@pytest.mark.parametrize("row", sampled(ROWS, 5, name=_name))
def test_all_processes_end_within_the_bound_and_say_who_is_missing(
    tmp_path: pathlib.Path, row: Any
) -> None:
    place, fault = row
    env = {
        "JAXDIST_COLLECTIVE_SECONDS": str(COLLECTIVE_SECONDS),
        "JAXDIST_JOIN_SECONDS": str(JOIN_SECONDS),
        "JAXDIST_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
    }
    with make_hosts(2) as hosts:
        how: dict[str, Any] = {
            "addresses": [f"{host.address}:2222" for host in hosts],
            "holders": [host.holder for host in hosts],
        }
        args = (place, fault, str(tmp_path))
        with start_job(wait, 2, args=args, env=env, **how) as job:
            job.wait_for_line(1, "ready", timeout=60)
            if fault in CUT:
                hosts[1].cut()
                (tmp_path / "cut").touch()
            if fault == "a host that is gone":
                job.kill(1)
            began = time.monotonic()
            job.wait_for_end(0, 100)
            ended = time.monotonic() - began
            if fault == "SIGSTOP":
                job.kill(1)
            # The process that is alone ends by itself, too.
            waits, alone = job.wait(60)
    assert waits.exit_code == 0, waits.describe()
    if place == "the end":
        # The process that hosts the service waits for the others after its work.
        assert waits.result["error"] is None, waits.describe()
        assert ended < (12 if fault in ENDED else COLLECTIVE_SECONDS + 10), waits.describe()
    else:
        _check_who_waits(place, fault, waits.result)
    assert not alone.timed_out, alone.describe()
    if fault == "a cut link":
        _check_alone(place, alone)


def _check_who_waits(place: str, fault: str, result: dict[str, Any]) -> None:
    if place == "join":
        assert result["error"] == "ClusterError", result
        assert "process 1 at 10.77.0.2:2222" in result["message"], result
        assert result["seconds"] < JOIN_SECONDS + 10, result
    elif fault in ENDED:
        assert result["error"] == "UnavailableError", result
        assert result["processes"] == (1,), result
        # Three seconds without news, and the looks of both sides.
        assert result["seconds"] < 12, result
    else:
        # It may live, as far as process 0 can know.
        assert result["error"] in ("DeadlineExceededError", "UnavailableError"), result
        assert result["processes"] == (1,), result
        assert result["seconds"] < COLLECTIVE_SECONDS + 15, result


def _check_alone(place: str, alone: Any) -> None:
    """JAX's C++ code ends a process whose heartbeat has no answer, once it has joined."""
    if place == "join":
        assert alone.exit_code == 0, alone.describe()
        assert alone.result["error"] == "ClusterError", alone.describe()
        assert alone.result["seconds"] < JOIN_SECONDS + 10, alone.describe()
    else:
        assert alone.exit_code == -signal.SIGABRT, alone.describe()
        assert "CoordinationService/Heartbeat" in alone.stderr, alone.describe()
