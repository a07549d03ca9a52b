"""Starts the processes of a job on this machine.

`launch` hosts the coordination service, starts the processes, prefixes their output, and reports
which process failed first. No process of the job hosts anything that the others need.
"""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._launching.child import record_error as record_error
    from jaxdist._launching.cluster import FINISHED as FINISHED
    from jaxdist._launching.cluster import LAUNCH_ID as LAUNCH_ID
    from jaxdist._launching.cluster import ClusterJob as ClusterJob
    from jaxdist._launching.cluster import launch_cluster as launch_cluster
    from jaxdist._launching.command import Program as Program
    from jaxdist._launching.command import make_command as make_command
    from jaxdist._launching.files import TARGETS as TARGETS
    from jaxdist._launching.files import Request as Request
    from jaxdist._launching.files import TaskRequest as TaskRequest
    from jaxdist._launching.job import Job as Job
    from jaxdist._launching.job import Outcome as Outcome
    from jaxdist._launching.job import launch as launch
    from jaxdist._launching.job import run_attempt as run_attempt
    from jaxdist._launching.on_ray import connect_to_ray as connect_to_ray
    from jaxdist._launching.output import say as say
    from jaxdist._launching.output import write_to as write_to
    from jaxdist._launching.ports import find_free_ports as find_free_ports
    from jaxdist._launching.processes import Patience as Patience
    from jaxdist._launching.signals import collect_signals as collect_signals

_open_late(__name__)
