"""Strategies with parameter servers in this process, for tests."""

from typing import Any

from jaxdist import ParameterServerStrategy
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver


def make_resolver(servers: int = 2, workers: int = 2, **more: Any) -> SimpleClusterResolver:
    """Return a cluster whose tasks are all in this process."""
    spec = ClusterSpec(
        {
            "chief": ["chief:0"],
            "ps": [f"ps{n}:0" for n in range(servers)],
            "worker": [f"worker{n}:0" for n in range(workers)],
        }
    )
    return SimpleClusterResolver(spec, rpc_layer="local", task_type="chief", task_id=0, **more)


def make_strategy(servers: int = 2, workers: int = 2, **options: Any) -> ParameterServerStrategy:
    """Return a strategy whose tasks are all in this process."""
    return ParameterServerStrategy(make_resolver(servers, workers), **options)
