"""`TFConfigClusterResolver`: reads the cluster and the task from `TF_CONFIG`."""

import json
from collections.abc import Mapping
from typing import Any, final

from jaxdist._called import called
from jaxdist._validate import check_instance, show
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import (
    ClusterResolver,
    check_task,
    find_master,
    read_environ,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError, ClusterError

_CALLER = "TFConfigClusterResolver"
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)


@final
class TFConfigClusterResolver(ClusterResolver):
    """A resolver that reads the environment variable `TF_CONFIG`.

    Each access reads the variable again, so later changes take effect. Arguments override the
    variable. Without the variable the cluster is empty.

    Args:
        task_type: The job of this process.
        task_id: The number of this process in its job.
        rpc_layer: The protocol prefix of addresses; `''` for none.
        environment: The environment of the cluster.
        environ: The environment variables to read, instead of those of this process.

    Raises:
        ClusterError: On access, if `TF_CONFIG` is not valid.

    Example:
        >>> import json
        >>> tasks = {"worker": ["host0:2222", "host1:2222"]}
        >>> environ = {"TF_CONFIG": json.dumps(
        ...     {"cluster": tasks, "task": {"type": "worker", "index": 1}})}
        >>> resolver = jaxdist.cluster_resolver.TFConfigClusterResolver(environ=environ)
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'host1:2222')

    Source:
        `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        check_task(task_type, task_id, rpc_layer)
        if environment is not None:
            remedy = "Leave environment out."
            check_instance("environment", environment, str, "a string or None", remedy)
        self._environ = read_environ(environ)
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks that `TF_CONFIG` lists; an empty spec if it has no cluster.

        Raises:
            ClusterError: `TF_CONFIG` is not valid.
            ArgumentTypeError: A part of its cluster has the wrong type.
        """
        cluster = self._read().get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (ArgumentError, ArgumentTypeError) as error:
            first = str(error).split("\n")[0].rstrip(".")
            what = first.replace("ClusterSpec was given cluster", "'cluster'", 1)
            what = what.replace("'cluster'=", "'cluster' is ", 1)
            raise self._fault(
                f"in which {what}",
                "'cluster' is an object from jobs to lists of addresses.",
                type(error) is ArgumentTypeError,
            ) from None

    @called(f"{_CALLER}.master")
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return `session_master` of `TF_CONFIG`, or the address of a task; empty for one task.

        Args:
            task_type: The job; the default is that of this process.
            task_id: The number of the task; the default is that of this process.
            rpc_layer: The protocol prefix of the address; `''` for none.

        Raises:
            ClusterError: `TF_CONFIG` is not valid, or does not say which task this process is.
            NotFoundError: The cluster has no such task.
        """
        check_task(task_type, task_id, rpc_layer)
        given = self._read_text("session_master")
        if given is not None:
            return given
        spec = self.cluster_spec()
        if not spec or (len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise self._fault(
                f"and cannot find the address of {task_type!r} {task_id!r}",
                "In a cluster of several tasks, 'task' says which one this process is.",
            )
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return find_master(spec, (task_type, task_id), layer)

    @called(f"{_CALLER}.num_accelerators")
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of a task, by kind; by default of this process."""
        check_task(task_type, task_id)
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The environment of the cluster, as given."""
        return self._environment

    def _find_task_type(self) -> str | None:
        task = self._read_task()
        if "type" not in task:
            return None
        if not isinstance(task["type"], (str, int)) or isinstance(task["type"], bool):
            raise self._fault(
                f"in which task.type is {show(task['type'])}", "task.type is the name of a job."
            )
        return str(task["type"])

    def _find_task_id(self) -> int | None:
        task = self._read_task()
        if "index" not in task:
            return None
        index = task["index"]
        is_number = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        if not is_number and not (isinstance(index, str) and index.strip().isdecimal()):
            raise self._fault(
                f"in which task.index is {show(index)}",
                "task.index is the number of this process in its job, an integer from 0 up.",
                not isinstance(index, (str, int)),
            )
        return int(index)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix of addresses."""
        return self._read_text("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _describe_source(self) -> str:
        text = self._environ.get("TF_CONFIG")
        return "TF_CONFIG is not set" if text is None else f"TF_CONFIG={_shorten(text)}"

    def _read(self) -> dict[str, Any]:
        text = self._environ.get("TF_CONFIG", "{}")
        try:
            config = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise self._fault(
                f"which is not valid JSON: {error}", "TF_CONFIG is a JSON object."
            ) from None
        if not isinstance(config, dict):
            raise self._fault(
                f"which is a {type(config).__name__}, not an object", "TF_CONFIG is a JSON object."
            )
        return config

    def _read_task(self) -> dict[str, Any]:
        task = self._read().get("task", {})
        if not isinstance(task, dict):
            raise self._fault(
                f"in which 'task' is {show(task)}", "'task' is an object with 'type' and 'index'."
            )
        return task

    def _read_text(self, key: str) -> str | None:
        value = self._read().get(key)
        if value is not None and not isinstance(value, str):
            raise self._fault(f"in which {key!r} is {show(value)}", f"{key!r} is a string.")
        return value

    def _fault(self, found: str, rule: str, is_type: bool = False) -> Exception:
        """Return the error for an invalid `TF_CONFIG`: a quote, the rule, and an example."""
        kind = ArgumentTypeError if is_type else ClusterError
        return kind(
            f"{_CALLER} read {self._describe_source()}, {found}.\n\n{rule}\n\n"
            f"Set for instance TF_CONFIG='{_EXAMPLE}'."
        )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:197]}...")
