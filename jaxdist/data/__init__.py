"""Datasets whose batches are split over the replicas and copied to the devices in advance."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.data._context import InputContext as InputContext
    from jaxdist.data._context import OptionalBatch as OptionalBatch
    from jaxdist.data._context import ValueContext as ValueContext
    from jaxdist.data._dataset import DistributedDataset as DistributedDataset
    from jaxdist.data._distribute import distribute_dataset as distribute_dataset
    from jaxdist.data._distribute import (
        distribute_datasets_from_function as distribute_datasets_from_function,
    )
    from jaxdist.data._iterator import DistributedIterator as DistributedIterator
    from jaxdist.data._options import InputOptions as InputOptions
    from jaxdist.data._options import InputReplicationMode as InputReplicationMode
    from jaxdist.data._options import checked_options as checked_options
    from jaxdist.data._reading.ahead import INFINITE_CARDINALITY as INFINITE_CARDINALITY
    from jaxdist.data._reading.ahead import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
    from jaxdist.data._reading.batches import Batches as Batches
    from jaxdist.data._reading.batches import batches as batches
    from jaxdist.data._reading.files import Files as Files
    from jaxdist.data._reading.files import from_files as from_files
    from jaxdist.data._reading.partial_batch import PartialBatch as PartialBatch
    from jaxdist.data._reading.shard_policy import AutoShardPolicy as AutoShardPolicy
    from jaxdist.data._reading.sources import Examples as Examples

_open_late(__name__)
