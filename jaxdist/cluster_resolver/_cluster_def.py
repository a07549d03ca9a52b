"""`ClusterDef`: a cluster with the fields of TensorFlow's protocol buffers."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class JobDef:
    """A job: its name, and the address of each task by its number.

    Source:
        `tf.train.JobDef`.
    """

    name: str
    tasks: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class ClusterDef:
    """The jobs of a cluster.

    Source:
        `tf.train.ClusterDef`.
    """

    job: tuple[JobDef, ...]


def read_cluster_def(cluster: Any) -> Mapping[Any, Any] | None:
    """Return a dict from jobs to tasks, from a dict or a `ClusterDef`; None for other types.

    Messages of TensorFlow are read by their fields, so TensorFlow is not imported.
    """
    if isinstance(cluster, Mapping):
        return cluster
    jobs = getattr(cluster, "job", None)
    if isinstance(jobs, (str, bytes, Mapping)) or not hasattr(jobs, "__len__"):
        return None
    listed = list(jobs) if jobs is not None else []
    if not all(hasattr(job, "name") and hasattr(job, "tasks") for job in listed):
        return None
    return {job.name: dict(job.tasks) for job in listed}
