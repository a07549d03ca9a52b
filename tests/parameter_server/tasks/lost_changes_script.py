"""The script of all tasks of a job whose chief changes a variable that functions only read.

`python lost_changes_script.py <who uses the variable after the restart: chief, function, nobody>`
"""

import json
import logging
import sys
import time
from typing import Any

import numpy as np

import jaxdist
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator

WARNINGS: list[str] = []


class _Keep(logging.Handler):
    """Keeps the texts of warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        WARNINGS.append(record.getMessage())


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


def wait_for_warning(seconds: float = 20) -> list[str]:
    """Return the warnings about variables; functions do not wait for the report."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any("'rate'" in text for text in WARNINGS):
        time.sleep(0.05)
    return [text for text in WARNINGS if "'rate'" in text]


def train(user: str) -> None:
    """Change the rate, wait until the server of it was killed, and say what is known of it."""
    logging.getLogger("jaxdist").addHandler(_Keep(logging.WARNING))
    strategy = jaxdist.ParameterServerStrategy(TFConfigClusterResolver())
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        rate = jaxdist.Variable(np.float32(1), name="rate")
        total = jaxdist.Variable(np.float32(0), name="total")
        shift = jaxdist.Variable(0, name="shift")

    def step() -> Any:
        total.assign_add(rate.value())
        return rate.value()

    coordinator.schedule(step).fetch()
    rate.assign(np.float32(2))
    rate.assign_add(np.float32(3))
    # On the other server, which goes on.
    total.assign_add(np.float32(1))
    strategy.run(lambda: shift.assign_add(1, read_value=False))
    say(event="changed", rate=float(rate), server=rate.device, lost=get_lost(coordinator))
    sys.stdin.readline()
    used, warnings = None, []
    if user == "chief":
        used = float(rate)
        warnings = list(WARNINGS)
    elif user == "function":
        used = float(coordinator.schedule(step).fetch())
        warnings = wait_for_warning()
    lost = get_lost(coordinator)
    found = coordinator.statistics()
    say(
        event="end",
        used=used,
        warnings=warnings or list(WARNINGS),
        lost_changes=lost,
        again=get_lost(coordinator),
        scheduled=found.scheduled,
        applied=found.applied,
        lost=found.lost,
    )


def get_lost(coordinator: ClusterCoordinator) -> int:
    """Return how many of the chief's own changes were lost."""
    return coordinator.statistics().lost_changes


def main() -> None:
    """Run one task."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        jaxdist.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, snapshot_seconds=1e6
        ).join()
        return
    train(sys.argv[1])


if __name__ == "__main__":
    main()
