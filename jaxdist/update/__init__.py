"""Updating parameters in pieces, one on each replica."""

from jaxdist.update._sharded_update import ShardedUpdate as ShardedUpdate
from jaxdist.update._sharded_update import shard_state as shard_state
from jaxdist.update._sharded_update import sharded_update as sharded_update
