"""Optimizer updates that bring gradients together themselves."""

from jaxdist.update._compressed_update import CompressedUpdate as CompressedUpdate
from jaxdist.update._compressed_update import CompressionErrors as CompressionErrors
from jaxdist.update._compressed_update import compressed_update as compressed_update
from jaxdist.update._moved_errors import are_errors as are_errors
from jaxdist.update._moved_errors import moved_errors as moved_errors
from jaxdist.update._sharded_update import ShardedUpdate as ShardedUpdate
from jaxdist.update._sharded_update import shard_state as shard_state
from jaxdist.update._sharded_update import sharded_update as sharded_update
