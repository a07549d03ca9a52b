"""What the processes of a job run for the tests of weights."""

import os
import pathlib
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

import jaxdist
from jaxdist import partition, training


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(512, 1024, rngs=rngs)
        self.second = nnx.Linear(1024, 33, rngs=rngs)


def round_trip(folder: str) -> dict[str, Any]:
    """Load a file into pieces over all processes, and export them again."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    model = Net(7)
    # Rows of 4 KiB: their halves would be read together.
    rules = partition.Rules([], otherwise=partition.Shard(0, pad=True))
    partition.place(strategy, model, rules)
    reads = []
    read = os.preadv

    def count(opened: int, buffers: Any, offset: int) -> int:
        reads.append(read(opened, buffers, offset))
        return reads[-1]

    with mock.patch.object(os, "preadv", count):
        training.load_weights(model, pathlib.Path(folder, "net.safetensors"))
    training.export_weights(model, pathlib.Path(folder, "again.safetensors"))
    exists = pathlib.Path(folder, "again.safetensors").exists()
    return {"read": sum(reads), "exists": exists}


def round_trip_of_parts(folder: str) -> dict[str, Any]:
    """The same with a folder that one process does not see."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    model = Net(7)
    partition.place(strategy, model, partition.Rules([], otherwise=partition.Shard(pad=True)))
    before = _sum(model)
    own = pathlib.Path(folder, "missing") if jax.process_index() == 1 else pathlib.Path(folder)
    errors = []
    for call in (
        lambda: training.load_weights(model, own / "net.safetensors"),
        lambda: training.export_weights(
            model, pathlib.Path(folder, "x"), like=own / "net.safetensors"
        ),
        # Process 0 cannot write there, and makes all gathers nevertheless.
        lambda: training.export_weights(model, pathlib.Path(folder, "net.safetensors", "x")),
    ):
        try:
            call()
        except jaxdist.errors.CheckpointError as error:
            errors.append(str(error))
    after = _sum(model)
    return {"errors": errors, "same": before == after}


def _sum(model: Net) -> float:
    held: Any = model.first.kernel.get_raw_value()
    return float(np.sum(held.held.addressable_data(0)))


def export_a_number_too_large(folder: str) -> dict[str, Any]:
    """Export three arrays of all processes, the first of which does not fit into `like`."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    large = {name: np.full((8, 2), 1e30, np.float32) for name in "abc"}
    rules = partition.Rules([], otherwise=partition.Shard(0))
    model = partition.place(strategy, large, rules)
    template = pathlib.Path(folder, "like.safetensors")
    try:
        training.export_weights(model, pathlib.Path(folder, "x.safetensors"), like=template)
    except jaxdist.errors.CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}
