"""Optimizer updates that reduce the gradients themselves."""

from jaxdist._update.compressed import CompressedUpdate as CompressedUpdate
from jaxdist._update.compressed import CompressionErrors as CompressionErrors
from jaxdist._update.compressed import compressed_update as compressed_update
from jaxdist._update.saved_errors import can_be_errors as can_be_errors
from jaxdist._update.saved_errors import move_errors as move_errors
from jaxdist._update.sharded import ShardedUpdate as ShardedUpdate
from jaxdist._update.sharded import shard_state as shard_state
from jaxdist._update.sharded import sharded_update as sharded_update
