"""Strategies whose replicas span several logical devices, and where each part of an array lies."""

import itertools
from typing import Any

import numpy as np

import jaxdist
from jaxdist.tpu.experimental import DeviceAssignment, initialize_tpu_system

_SHAPES = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [2, 1, 1, 2], 8: [2, 2, 1, 2]}


def tpus(num_replicas: int, num_logical: int, *, spmd: bool = False) -> jaxdist.TPUStrategy:
    """Virtual TPUs: replicas of 1, 2, 4 or 8 logical devices."""
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, _SHAPES[num_logical], num_replicas=num_replicas)
    return jaxdist.TPUStrategy(resolver, assignment, spmd)


def check_tiles(array: Any, whole: np.ndarray, parts: list[int], layout: Any) -> None:
    """Every logical device of every replica has the part that TensorFlow gives it."""
    on = {s.device: np.asarray(s.data) for s in array.addressable_shards}
    cuts = [np.split(np.arange(n), p) for n, p in zip(whole.shape, parts, strict=True)]
    tiles = [whole[np.ix_(*rows)] for rows in itertools.product(*cuts)]
    for replica in layout.device_grid:
        for device, tile in zip(replica, tiles, strict=True):
            np.testing.assert_array_equal(on[device], tile)
