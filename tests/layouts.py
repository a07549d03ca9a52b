"""Layouts of the first devices, as strategies have them."""

from typing import Any

import jax
import numpy as np

import jaxdist


def make_layout(num_replicas: int, num_logical: int = 1) -> Any:
    """Return the layout of a strategy whose replicas have `num_logical` devices each."""
    devices = jax.devices()[: num_replicas * num_logical]
    if num_logical == 1:
        return jaxdist.MirroredStrategy(devices).layout
    grid = np.asarray(devices, dtype=object).reshape(num_replicas, num_logical)
    mesh = jax.sharding.Mesh(grid, ("replica", "logical"))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes="replica").layout
