"""Steps over logical devices, compiled by libtpu for slices that are not here."""

import os
import subprocess
import sys

import pytest

# In a process of its own: libtpu reads the environment once.
COMPILED = """
import jax, jax.numpy as jnp, numpy as np
import jaxdist
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.tpu.experimental import DeviceAssignment, initialize_tpu_system

CASES = [("v4:2x2x2", [1, 1, 1, 2], 8), ("v5e:4x4", [2, 2, 1, 1], 4),
         ("v5p:4x4x4", [2, 2, 1, 1], 16), ("v6e:8x8", [2, 2, 1, 1], 16),
         ("v5e:4x4*2", [2, 2, 1, 1], 8)]


def step_of(strategy, kind, cores):
    split = strategy.experimental_split_to_logical_devices
    replicate = strategy.experimental_replicate_to_logical_devices
    assign = strategy.experimental_assign_to_logical_device

    def layers(w, v, x):
        if kind == "placed":
            return assign(assign(jnp.tanh(x @ w), 0) @ v, 1)
        return jnp.tanh(x @ w) @ v

    def step(w, v, x):
        if kind == "spmd":
            w, v, x = split(w, [1, cores]), split(v, [cores, 1]), replicate(x)
        value, grads = jax.value_and_grad(
            lambda p: (layers(*p, x) ** 2).mean())((w, v))
        dw, dv = jaxdist.get_replica_context().all_reduce("mean", grads)
        if kind == "split":
            w, v = split(w - dw, [1, cores]), split(v - dv, [cores, 1])
            return w, v, value
        return w - dw, v - dv, value

    return step


def tiled(strategy, x):
    # The image of the page, its rows and columns in tiles; 15 columns are padded.
    x = strategy.experimental_split_to_logical_devices(x, [1, 2, 2, 1])
    y = jax.lax.conv_general_dilated(x, jnp.ones((3, 3, 8, 8)), (1, 1), "SAME",
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return strategy.experimental_split_to_logical_devices(jnp.tanh(y), [1, 2, 2, 1])


for name, shape, replicas in CASES:
    resolver = TPUClusterResolver("described:" + name)
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, shape, num_replicas=replicas)
    cores = assignment.num_cores_per_replica
    # Partition r * cores + l is logical device l of replica r.
    of_replicas = [frozenset(range(l, replicas * cores, cores)) for l in range(cores)]
    of_cores = [frozenset(range(r * cores, r * cores + cores)) for r in range(replicas)]
    for kind in ("split", "spmd", "placed") if "v5e" in name else ("split", "spmd"):
        strategy = jaxdist.TPUStrategy(resolver, assignment, kind == "spmd")
        w, v = (jax.ShapeDtypeStruct(s, "float32") for s in ((256, 512), (512, 256)))
        if kind != "placed":
            w = strategy.experimental_split_to_logical_devices(w, [1, cores])
            v = strategy.experimental_split_to_logical_devices(v, [cores, 1])
        x = jax.ShapeDtypeStruct((8 * replicas, 256), "float32",
                                 sharding=strategy.per_replica_sharding)
        program = strategy.lower(step_of(strategy, kind, cores), (w, v, x))
        compiled = program.compile()
        where = (name, kind, compiled.collectives)
        # Within a replica go activations alone: no weight is gathered, whole or in part.
        inside = [c for c in compiled.collectives if set(map(frozenset, c.groups)) <= set(of_cores)]
        between = [c for c in compiled.collectives if c not in inside]
        assert inside and between, where
        if kind == "placed":
            assert compiled.as_text().count(" conditional(") == 4, where
            assert [work.device for work in program.placed] == [0, 1, 1, 0], program
        else:
            assert all(c.kind == "all-reduce" for c in inside), where
            assert all(c.bytes_per_device <= 8 * 256 * 4 for c in inside), where
        if "*" not in name:
            [sums] = between
            assert sums.kind == "all-reduce", where
            assert set(map(frozenset, sums.groups)) == set(of_replicas), where
            size = 256 * 512 * 4 // (1 if kind == "placed" else cores)
            assert sums.bytes_per_device == 2 * size, where
            continue
        # Between slices XLA makes an exchange of pairs, by device; within, groups of partitions.
        logical = {d.id: l for (_, l), d in np.ndenumerate(strategy.mesh.devices)}
        for c in between:
            number = logical if c.between_slices else {i: i % cores for i in range(32)}
            assert all(len({number[i] for i in g}) == 1 for g in c.groups), where
        assert any(c.between_slices for c in between), where

    if name == "v5e:4x4":
        image = jax.ShapeDtypeStruct((2 * replicas, 16, 15, 8), "float32",
                                     sharding=strategy.per_replica_sharding)
        compiled = strategy.lower(lambda x: tiled(strategy, x), (image,)).compile()
        # Rows are exchanged with neighbours, and columns, which come back whole, gathered.
        assert compiled.collectives, name
        assert "f32[2,8," in compiled.as_text(), name
print("all compiled")
"""


def test_steps_over_logical_devices_compile_for_every_generation() -> None:
    pytest.importorskip("libtpu")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "XLA_FLAGS"))}
    # The worker beside this one may have libtpu open as well.
    environment |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=environment | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all compiled" in done.stdout
