"""Writes files that start the job of a `jaxdist launch` command on a cluster."""

from jaxdist._launching.files.jobset import make_jobset as make_jobset
from jaxdist._launching.files.jobset_tasks import make_task_jobset as make_task_jobset
from jaxdist._launching.files.request import Request as Request
from jaxdist._launching.files.skypilot import make_skypilot_task as make_skypilot_task
from jaxdist._launching.files.slurm import make_slurm_script as make_slurm_script
from jaxdist._launching.files.slurm_tasks import make_task_script as make_task_script
from jaxdist._launching.files.tasks import TaskRequest as TaskRequest
from jaxdist._launching.files.tasks import refuse_skypilot as refuse_skypilot
