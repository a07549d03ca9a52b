"""Loads weights, and prints by how many bytes the memory of the process grew at most."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxdist import training

_ROWS = 4096


def _read_status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main(path: str, dim: int) -> None:
    """Load two arrays, cut along a dim, or whole on a device for -1."""
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.P(*[None] * dim, "x") if dim >= 0 else jax.P()
    place = jax.NamedSharding(mesh, spec) if dim >= 0 else jax.devices()[0]
    shapes = {"large": (_ROWS, 8192), "small": (_ROWS, 1024)}
    safetensors.numpy.save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, path)
    model = {n: jax.device_put(jnp.zeros(s), place) for n, s in shapes.items()}
    # A small load first, since it imports and starts threads.
    one = {"small": jnp.zeros(shapes["small"])}
    training.load_weights(one, path, ignore=["large"])
    jax.block_until_ready(model)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _read_status("VmRSS")
    found = jax.block_until_ready(training.load_weights(model, path))
    grown = _read_status("VmHWM") - before
    sizes = [x.nbytes for x in found.values()]
    print(json.dumps({"grown": grown, "largest": max(sizes), "own": sum(sizes)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
