"""`jaxdist train`, in which one process is killed after a step of the first attempt."""

import json
import os
import signal
import sys
from typing import Any

from jaxdist.cli import main
from jaxdist.jobs._run.run import Run

_collect = Run._collect


def _collect_or_die(self: Run, step: int, loss: Any) -> None:
    _collect(self, step, loss)
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    is_first = os.environ["JAXDIST_ATTEMPT"] == "1"
    if is_first and index == int(os.environ["VICTIM"]) and step == int(os.environ["AT_STEP"]):
        # Then the steps before are complete in the other process, too.
        loss.block_until_ready()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Run._collect = _collect_or_die  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
