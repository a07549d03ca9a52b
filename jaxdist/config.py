"""Settings of this process, with names as in `tf.config`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._compilation_cache import compilation_cache as compilation_cache
    from jaxdist._gpu_settings import gpu_flags as gpu_flags
    from jaxdist._processes import processes as processes
    from jaxdist._program import run_eagerly as run_eagerly
    from jaxdist._program import steps_run_eagerly as steps_run_eagerly
    from jaxdist.cluster_resolver import (
        experimental_connect_to_cluster as experimental_connect_to_cluster,
    )
    from jaxdist.cost import links as links

_open_late(__name__)
