"""Devices of NVIDIA GPUs to compile for, on a machine without one."""

import importlib.util
import pkgutil
from typing import Any

import jax
from jax._src import xla_bridge as _bridge

# JAX's plugin looks for the CUDA libraries that a run needs; a compilation needs none of them.
SKIP_CUDA_CHECKS = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# Messages of compilers without tiles for a product of Triton: of JAX 0.10, and of 0.11.
_NO_TILES = ("Couldn't find output tile sizes", "No supported config found")


def find_cuda_plugin() -> str | None:
    """Return the name of JAX's CUDA plugin, such as `xla_cuda12`, if it is installed."""
    found = importlib.util.find_spec("jax_plugins")
    folders = list(found.submodule_search_locations or []) if found else []
    names = [m.name for m in pkgutil.iter_modules(folders)]
    return next((name for name in names if name.startswith("xla_cuda")), None)


def make_gpu_devices(plugin: str, target: str, topology: str) -> list[Any]:
    """Return devices that programs can be compiled for.

    It works before and after JAX has started, with any backend, if the environment has
    `SKIP_CUDA_CHECKS`. Waits for a public way to use a plugin after JAX has looked for backends.

    Args:
        plugin: The name of JAX's CUDA plugin.
        target: A `GpuTargetConfigProto` as text.
        topology: NVLink domains, hosts of one and GPUs of a host: `4x1x8`.
    """
    # Imported late: few programs need this module.
    from jax.experimental import topologies

    def describe() -> list[Any]:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=topology
        )
        return list(found.devices)

    try:
        return describe()
    except NotImplementedError:
        # JAX has already looked for backends, and the plugin refused to be one without a driver.
        if "cuda" in _bridge._topology_factories:
            raise
        importlib.import_module(f"jax_plugins.{plugin}").initialize()
        return describe()


def get_gpu_plan_options() -> dict[str, bool | str]:
    """Return compile options for described GPUs.

    Without a GPU, XLA cannot measure kernels to choose one, and cannot ask the CUDA runtime how the
    GPU sorts: JAX 0.12 fails, and 0.10 warns. Waits for a compiler that does without it.
    """
    return {"xla_gpu_autotune_level": "0", "xla_gpu_enable_cub_radix_sort": False}


def compile_for_gpu_plan(lowered: jax.stages.Lowered, options: dict[str, Any]) -> Any:
    """Compile for described GPUs.

    If the compiler of JAX 0.10 or 0.11 finds no tiles for a product of Triton, which it would look
    for on a GPU, the products are calls of cuBLAS. Waits for the end of JAX 0.11.
    """
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not any(said in str(error) for said in _NO_TILES):
            raise
        return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False})
