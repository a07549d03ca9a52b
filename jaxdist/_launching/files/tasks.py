"""`TaskRequest`: what parameter servers, workers and a chief need on a cluster."""

import dataclasses
from collections.abc import Sequence

from jaxdist._launching.files.request import Request

# The extra `grpcio` of jaxdist installs these: tasks use gRPC.
_PACKAGES = ("grpcio", "grpcio-health-checking", "flatbuffers", "zlib-ng")


@dataclasses.dataclass(frozen=True)
class TaskRequest:
    """A job with parameter servers, and what it needs on a cluster.

    Args:
        request: The job: what the chief runs, and the total number of tasks.
        server_arguments: The arguments after `python` in the command of the other tasks.
        ps: Number of parameter servers.
        workers: Number of workers.
        snapshot_directory: Where snapshots are kept; None for a place that ends with the job.
    """

    request: Request
    server_arguments: Sequence[str]
    ps: int
    workers: int
    snapshot_directory: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each job."""
        return {"chief": 1, "ps": self.ps, "worker": self.workers}

    def make_part(self, job: str) -> Request:
        """Return what the tasks of one job run and need. Only workers get GPUs."""
        part = dataclasses.replace(self.request, packages=_PACKAGES, count=self.counts[job])
        if job != "worker":
            part = dataclasses.replace(part, gpu=None, devices=None)
        if job == "chief":
            return part
        arguments = list(self.server_arguments)
        if arguments == list(part.arguments):
            return part
        # `jaxdist server` needs neither the script nor the packages of a training.
        name = part.job_name
        return dataclasses.replace(
            part, arguments=arguments, file=None, is_training=False, name=name
        )
