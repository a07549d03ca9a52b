"""Write the texts of `recorded/`, which the compilers of CPU, TPU and GPU make of the programs.

    python -m tests.hlo.record cpu|tpu|gpu

writes one file for the installed version of JAX; what is there of other versions stays. TPU needs
libtpu. GPU needs no GPU and no driver, only JAX's CUDA plugin and ptxas, in an environment of its
own: `pip install "jax[cuda13-local]" nvidia-cuda-nvcc` (JAX 0.12, Python 3.12 and up), or
`pip install "jax[cuda12-local]" nvidia-cuda-nvcc-cu12` (JAX 0.10.2, Python 3.11).

A file holds many texts; each begins with a line of JSON after `###`: the program, the topology, the
devices, and what the trace asks of one device.
"""

import dataclasses
import json
import lzma
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
MARK = "### "
TOPOLOGIES = {"cpu": ("8",), "tpu": ("v5e:2x4",), "gpu": ("1x1x8", "4x1x8")}
# XLA tries kernels on a GPU, and there is none.
_GPU_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0}
_FILE = re.compile(r'^(\d+ )"[^"]*[/\\]([^"/\\]+)"$')
_SOURCE = re.compile(r'source_file="[^"]*[/\\]([^"/\\]+)"')


@dataclasses.dataclass(frozen=True)
class Text:
    """A recorded text, and what is known of it."""

    program: str
    platform: str
    version: str
    topology: str
    devices: int
    asked: dict[str, int]
    text: str

    def __str__(self) -> str:
        return f"{self.program}-{self.platform}-{self.topology}-jax{self.version}"


def recorded() -> Iterator[Text]:
    """All texts that were recorded."""
    for path in sorted(RECORDED.glob("*.txt.xz")):
        platform, version = path.name.removesuffix(".txt.xz").split("-jax-")
        for part in lzma.decompress(path.read_bytes()).decode().split(MARK)[1:]:
            head, _, text = part.partition("\n")
            about = json.loads(head)
            yield Text(platform=platform, version=version, text=text, **about)


def without_paths(text: str) -> str:
    """The text with names of files in the place of their paths."""
    lines = (_FILE.sub(r'\1"\2"', line) for line in text.splitlines())
    return _SOURCE.sub(r'source_file="\1"', "\n".join(lines))


def main(platform: str) -> None:
    """Compile every program of a platform, and write the file."""
    if platform == "gpu":
        # Or the plugin looks for the libraries of CUDA that only a run needs.
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    parts = []
    for topology in TOPOLOGIES[platform]:
        for about, text in _compiled(platform, topology):
            parts.append(f"{MARK}{json.dumps(about)}\n{without_paths(text)}\n")
            print(about, flush=True)
    path = RECORDED / f"{platform}-jax-{jax.__version__}.txt.xz"
    path.write_bytes(lzma.compress("".join(parts).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(path.name, path.stat().st_size, "bytes")


def _compiled(platform: str, topology: str) -> Iterator[tuple[dict[str, Any], str]]:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from tests.hlo.asked import asked
    from tests.hlo.programs import AXIS, PROGRAMS

    devices = _devices(platform, topology)
    mesh = Mesh(np.array(devices), (AXIS,))
    for program in PROGRAMS:
        if platform not in program.platforms:
            continue
        options: dict[str, Any] = dict(program.options)
        if platform == "gpu":
            options |= _GPU_OPTIONS
            if program.name == "sort" and jax.__version_info__ >= (0, 12):
                # The other way asks the CUDA runtime about the GPU.
                options["xla_gpu_enable_cub_radix_sort"] = False
        traced = jax.jit(program.mapped(mesh)).trace(*program.described(mesh))
        found = traced.lower().compile(compiler_options=options or None)
        wanted = dict(asked(traced.jaxpr))
        if program.gspmd:
            wanted = {"flops": wanted["flops"] // len(devices)}
        about = {
            "program": program.name,
            "topology": topology,
            "devices": len(devices),
            "asked": wanted,
        }
        yield about, found.as_text() or ""


def _devices(platform: str, topology: str) -> Any:
    import jax
    from jax.experimental import topologies

    from jaxdist._gpus import GpuCluster, describe_gpus

    if platform == "cpu":
        return jax.devices()
    if platform == "tpu":
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-16",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    domains, hosts, gpus = map(int, topology.split("x"))
    return describe_gpus(GpuCluster("h100", domains, hosts, gpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
