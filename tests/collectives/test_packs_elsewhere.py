"""Packs on TPUs and GPUs: programs that libtpu compiles, and compiler options for GPUs."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist.experimental import CommunicationOptions

TPU = """
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from jaxdist import _mesh as mesh
from jaxdist import hlo
from jaxdist._collectives import CommunicationOptions, plan_default_sum

MIB = 1 << 20
for name, packs in ("v5e:4x4", (0, MIB, 12 * MIB, 100 * MIB)), ("v5p:2x2x2", (12 * MIB,)):
    description = topologies.get_topology_desc(platform="tpu", topology_name=name)
    layout = mesh.build(description.devices)
    leaves = [jax.ShapeDtypeStruct((MIB,), jnp.float32, sharding=layout.replicated)] * 12
    for pack in packs:
        _, how = plan_default_sum(leaves, layout, CommunicationOptions(pack))
        mapped = jax.shard_map(
            lambda *xs: how([x * 2 for x in xs]),
            mesh=layout.mesh, in_specs=P(), out_specs=P(), check_vma=False,
        )
        compiled = jax.jit(mapped).lower(*leaves).compile()
        print(name, pack // MIB, *(c.operands for c in hlo.collectives(compiled.as_text())))
"""


@pytest.mark.slow
def test_tpu_programs_have_the_planned_packs_without_copies() -> None:
    pytest.importorskip("libtpu")
    variables = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.path.dirname(jaxdist.__path__[0]),
    }
    done = subprocess.run(
        [sys.executable, "-c", TPU],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    # Leaves of 4 MiB; a pack is closed when it has exceeded its size.
    assert done.stdout.splitlines() == [
        "v5e:4x4 0 12",
        f"v5e:4x4 1{' 1' * 12}",
        "v5e:4x4 12 4 4 4",
        "v5e:4x4 100 12",
        "v5p:2x2x2 12 4 4 4",
    ]


def test_gpus_are_told_the_size_of_the_largest_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        options = CommunicationOptions(bytes_per_pack=40)
        return get_replica_context().all_reduce("sum", [x * i for i in range(6)], options)

    program = strategy.lower(step, (PerReplica([np.ones(8, np.float32)] * 8),))
    assert program.compiler_options == {}
    monkeypatch.setitem(program.layout.__dict__, "platform", "gpu")
    told = program.compiler_options
    # Two leaves of 32 bytes.
    assert told == {"xla_gpu_all_reduce_combine_threshold_bytes": "64"}
    # The name is one that this XLA knows.
    jax.jit(jnp.sin).lower(1.0).compile(told)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such"):
        jax.jit(jnp.sin).lower(1.0).compile({"xla_gpu_no_such": "64"})
