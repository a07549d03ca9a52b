"""Datasets split over replicas."""
from jaxdist.data._context import *
from jaxdist.data._options import *
DistributedDataset = DistributedIterator = object
