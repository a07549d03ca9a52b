"""Optimizer updates that reduce the gradients themselves."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._update.averages import is_average_shown as is_average_shown
    from jaxdist._update.averages import keeps_average as keeps_average
    from jaxdist._update.averages import moving_average as moving_average
    from jaxdist._update.averages import use_average as use_average
    from jaxdist._update.compressed import CompressionErrors as CompressionErrors
    from jaxdist._update.compressed import compressed_update as compressed_update
    from jaxdist._update.nested import REDUCED as REDUCED
    from jaxdist._update.nested import ReducingUpdate as ReducingUpdate
    from jaxdist._update.nested import mark_wrapper as mark_wrapper
    from jaxdist._update.saved_errors import divide_errors as divide_errors
    from jaxdist._update.saved_errors import find_moved_pairs as find_moved_pairs
    from jaxdist._update.sharded import ShardedUpdate as ShardedUpdate
    from jaxdist._update.sharded import shard_state as shard_state
    from jaxdist._update.sharded import sharded_update as sharded_update

_open_late(__name__)
