"""Reads names of GPUs, which this machine need not have, and makes devices to compile for."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._gpus.cluster import DESCRIBED as DESCRIBED
    from jaxdist._gpus.cluster import GpuCluster as GpuCluster
    from jaxdist._gpus.cluster import cluster_of as cluster_of
    from jaxdist._gpus.cluster import is_gpu_name as is_gpu_name
    from jaxdist._gpus.cluster import is_gpu_of_table as is_gpu_of_table
    from jaxdist._gpus.describe import describe_gpus as describe_gpus
    from jaxdist._gpus.describe import find_description as find_description

_open_late(__name__)
