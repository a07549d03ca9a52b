"""Makes the resolver of an environment, as strategies make it, for `jaxdist resolve`."""

from collections.abc import MutableMapping
from typing import Any

from jaxdist.cluster_resolver import ENVIRONMENTS, ClusterResolver, find_source


def choose_source(environ: MutableMapping[str, str]) -> str:
    """Return the environment that strategies use; `tf_config` for a process that is alone.

    See Note [Which cluster a process is in].
    """
    found = find_source(environ).name
    return found if found in ENVIRONMENTS else "tf_config"


def make_resolver(
    source: str,
    environ: MutableMapping[str, str],
    task_type: str | None = None,
    task_id: int | None = None,
    **options: Any,
) -> ClusterResolver:
    """Return the resolver of an environment.

    Args:
        source: The name of the environment.
        environ: The variables, which are not changed.
        task_type: The job of this process, if it is another than the resolver says.
        task_id: Its number, if it is another than the resolver says.
        **options: What the environment does not contain.

    Raises:
        ArgumentError: For `gce`, the project, the zone or the instance group is missing.
        JaxdistError: The resolver raises an error.
    """
    environment = ENVIRONMENTS[source]
    if environment.has_task:
        options |= {"task_type": task_type, "task_id": task_id}
        task_type = task_id = None
    resolver = environment.make(dict(environ), **options, **environment.when_shown)
    # Before the task is set: in this call a resolver may set it.
    resolver.cluster_spec()
    if task_type is not None:
        resolver.task_type = task_type
    if task_id is not None:
        resolver.task_id = task_id
    return resolver
