"""Writes files that start the job of a `jaxdist launch` command on a cluster."""

import dataclasses
from collections.abc import Callable

from jaxdist._launching.files.jobset import make_jobset, make_task_jobset
from jaxdist._launching.files.request import Request as Request
from jaxdist._launching.files.request import TaskRequest as TaskRequest
from jaxdist._launching.files.skypilot import make_skypilot_task, refuse_tasks
from jaxdist._launching.files.slurm import make_slurm_script, make_task_script


@dataclasses.dataclass(frozen=True)
class Target:
    """A cluster for which files are written.

    Attributes:
        make: Returns the file of a job of equal processes.
        make_for_tasks: Returns the file of a job with parameter servers, or raises.
        installs: Whether pip installs jaxdist there.
    """

    make: Callable[[Request], str]
    make_for_tasks: Callable[[TaskRequest], str]
    installs: bool = True


TARGETS = {
    "jobset": Target(make_jobset, make_task_jobset),
    "slurm": Target(make_slurm_script, make_task_script, installs=False),
    "skypilot": Target(make_skypilot_task, refuse_tasks),
}
