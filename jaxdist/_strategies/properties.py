"""Properties of a strategy: its replicas, its mesh, its shardings."""

from typing import Any

from jax.sharding import Mesh, NamedSharding

from jaxdist._collectives import Communication
from jaxdist._mesh import ReplicaMesh


class StrategyProperties:
    """The properties of every strategy; `Strategy` has the methods."""

    layout: ReplicaMesh
    communication: Communication

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run a step together; with `deterministic`, virtual replicas.

        Example:
            >>> MirroredStrategy().num_replicas_in_sync
            8
            >>> MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True).num_replicas_in_sync
            8
        """
        return self.layout.num_replicas

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` of the strategy; its axes are Auto.

        Example:
            >>> MirroredStrategy().mesh.axis_names
            ('replica', 'logical')
        """
        return self.layout.mesh

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The mesh axes over which replicas run; `jax.lax.psum(x, strategy.replica_axes)` works.

        Example:
            >>> MirroredStrategy().replica_axes
            ('replica',)
        """
        return self.layout.replica_axes

    @property
    def replicated_sharding(self) -> NamedSharding:
        """The sharding of a mirrored value: the whole array on every device.

        Example:
            >>> w = jax.device_put(np.ones(3), MirroredStrategy().replicated_sharding)
            >>> w.is_fully_replicated
            True
        """
        return self.layout.replicated

    @property
    def per_replica_sharding(self) -> NamedSharding:
        """The sharding of a per-replica value: dim 0 split over the replicas.

        Example:
            >>> x = jax.device_put(np.ones((16, 3)), MirroredStrategy().per_replica_sharding)
            >>> x.addressable_shards[0].data.shape
            (2, 3)
        """
        return self.layout.per_replica

    @property
    def cluster_resolver(self) -> Any | None:
        """The cluster resolver of this strategy; None for strategies of one process.

        Example:
            >>> MirroredStrategy().cluster_resolver is None
            True
        """
        return None
