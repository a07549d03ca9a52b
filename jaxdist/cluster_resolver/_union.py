"""`UnionResolver`: joins the clusters of several resolvers."""

from typing import Any, final

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import show
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import ClusterResolver, check_task, find_master
from jaxdist.errors import DuplicateTaskError

_CALLER = "UnionResolver"


@final
class UnionResolver(ClusterResolver):
    """A resolver that joins the clusters of several resolvers.

    Everything else comes from the first resolver: the task of this process, the protocol, the
    environment and the accelerators.

    Args:
        *resolvers: One or more resolvers.
        rpc_layer: The protocol prefix of addresses, instead of the first resolver's.
        task_type: The job of this process, instead of the first resolver's.
        task_id: The number of this process in its job, instead of the first resolver's. TensorFlow
            ignores a 0 here.

    Raises:
        ArgumentError: No resolver is given.
        ArgumentTypeError: An argument is not a resolver.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver
        >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker")
        >>> more = SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]}))
        >>> union = UnionResolver(workers, more, task_id=0)
        >>> union.cluster_spec(), union.task_type, union.task_id
        (ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']}), 'worker', 0)

    Source:
        `tf.distribute.cluster_resolver.UnionResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        remedy = "Pass resolvers: UnionResolver(TFConfigClusterResolver())."
        if not resolvers:
            raise refuse("no resolvers.", "It joins one or more.", remedy)
        for number, resolver in enumerate(resolvers):
            if not isinstance(resolver, ClusterResolver):
                raise refuse_type(
                    f"resolvers[{number}]={show(resolver)}.",
                    "Each one is a ClusterResolver.",
                    remedy,
                )
        check_task(task_type, task_id, rpc_layer)
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers.

        The lists of a job are joined in the order of the resolvers. If one resolver numbers the
        tasks of a job with gaps, the tasks of the others also keep their numbers.

        Raises:
            DuplicateTaskError: In a job with gaps, two resolvers have a task with the same number.
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for part in parts for job in part)
        return ClusterSpec(
            {job: self._join(job, [p[job] for p in parts if job in p]) for job in jobs}
        )

    @called(f"{_CALLER}.master")
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the given task; without a task, that of the first resolver."""
        check_task(task_type, task_id, rpc_layer)
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        layer = rpc_layer or self._rpc_layer
        return find_master(self.cluster_spec(), (task_type, task_id), layer)

    @called(f"{_CALLER}.num_accelerators")
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of the first resolver."""
        check_task(task_type, task_id)
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The environment of the first resolver."""
        return self._resolvers[0].environment

    def _find_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _find_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix of addresses."""
        first: str | None = getattr(self._resolvers[0], "rpc_layer", None)
        return self._rpc_layer or first

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @staticmethod
    def _join(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
        lists = [part for part in parts if isinstance(part, list)]
        if len(lists) == len(parts):
            return [address for part in lists for address in part]
        joined: dict[int, str] = {}
        for part in parts:
            tasks = dict(enumerate(part)) if isinstance(part, list) else part
            twice = sorted(set(tasks) & set(joined))
            if twice:
                raise DuplicateTaskError(
                    f"{_CALLER}.cluster_spec found task {twice[0]} of job {job!r} twice: "
                    f"{joined[twice[0]]!r} and {tasks[twice[0]]!r}.\n\n"
                    "Where a resolver numbers the tasks of a job with gaps, the numbers of all "
                    f"resolvers count, and each occurs once.\n\nGive them other numbers: {twice}."
                )
            joined.update(tasks)
        return joined


UnionClusterResolver = UnionResolver
