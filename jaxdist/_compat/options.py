"""Compile options that depend on the version of JAX, and GPUs to compile for without one."""

import contextlib
import importlib.util
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import xla_bridge as _bridge

# Before JAX 0.11 XLA's CPU compiler drops optimization barriers before it combines all-reduces.
KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)


# Note [Equal bits on any number of devices]
# A program with `deterministic=True` has to compute the same bits on any number of devices. Some
# passes of XLA's CPU compiler depend on that number:
# - `cse` merges equal operations before the algebraic simplifier runs, but only in programs for
#   several devices. The simplifier counts the users of a value: it rewrites `x / s` as
#   `x * (1 / s)` if nothing else uses a broadcast `s`. So `cse` is disabled everywhere.
# - In JAX 0.10 `cse_barrier_expander` drops optimization barriers before the fusion passes, and
#   `small-while-loop-hoisting` moves loops into nested functions, where the compiler cannot emit a
#   barrier. Both are disabled there.
# - Shardy merges equal operations in MLIR, where no option of XLA applies. So these programs use
#   GSPMD (`use_exact_partitioner`).
_JOINING = ("cse",)
_DISABLED = "xla_disable_hlo_passes"
_BARRIERS_ON_OLD_CPU = ("cse_barrier_expander", "small-while-loop-hoisting")


def get_exact_options(platform: str) -> dict[str, bool | str]:
    """Return compile options for programs that must compute the same bits on other devices.

    XLA's passes on CPU depend on the number of devices, and those of JAX 0.10 drop optimization
    barriers before they fuse. GPUs may choose algorithms that add in any order. Waits for the end
    of JAX 0.10, and for a way to request determinism. See Note [Equal bits on any number of
    devices].
    """
    if platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    if platform != "cpu":
        return {}
    passes = _JOINING if KEEPS_BARRIERS else (*_BARRIERS_ON_OLD_CPU, *_JOINING)
    return {_DISABLED: ",".join(passes)}


@contextlib.contextmanager
def use_exact_partitioner(options: dict[str, Any] | None) -> Iterator[None]:
    """Lower and compile in this thread with the partitioner that `get_exact_options` need.

    Shardy, the default of JAX, changes programs for several devices only. Its MLIR passes merge
    equal operations, and no option of XLA disables them. GSPMD works on HLO, where `cse` can be
    disabled. XLA writes to stderr that GSPMD is deprecated. Waits for a Shardy that does not change
    the body of a `shard_map`.
    """
    exact = get_exact_options("cpu")
    # A user may disable other passes.
    if not options or options.get(_DISABLED) != exact[_DISABLED]:
        yield
        return
    with _config.use_shardy_partitioner(False):
        yield


def format_flags(options: dict[str, Any]) -> str:
    """Format `get_exact_options` and their partitioner as environment variables for a process."""
    flags = " ".join(f"--{name}={value}" for name, value in options.items())
    partitioner = " and JAX_USE_SHARDY_PARTITIONER=0" if _DISABLED in options else ""
    return f"XLA_FLAGS={flags!r}{partitioner}"


def are_set_by_flags(options: dict[str, Any]) -> bool:
    """Whether `XLA_FLAGS` sets `get_exact_options` for every program of this process."""
    if _DISABLED in options and _config.use_shardy_partitioner.value:
        return False
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    return all(
        f"--{name}={value}".lower() in given or (value is True and f"--{name}" in given)
        for name, value in options.items()
    )


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


def has_compilation_cache() -> bool:
    """Whether JAX keeps compiled programs in a folder. Waits for typed options of JAX."""
    return _config.compilation_cache_dir.value is not None


# A flag of GPUs that a CPU does not read. It is part of the key of a program in the cache.
_OTHER_KEY = {"xla_gpu_shard_autotuning": False}


def compile_anew(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile for CPUs so that the program can be serialized, without JAX's compilation cache.

    A program that XLA's CPU client has read from the cache is serialized without its machine code,
    and another process that loads it fails when it runs. Waits for XLA to keep the code.
    """
    with outside_of_cache():
        return lowered.compile(compiler_options={**options, **_OTHER_KEY})


@contextlib.contextmanager
def outside_of_cache() -> Iterator[None]:
    """Compile in this thread without writing to JAX's compilation cache.

    JAX writes programs for devices that are not there, and warns when it cannot read them. Waits
    for a cache that leaves them out.
    """
    with _config.persistent_cache_min_compile_time_secs(float("inf")):
        yield


def compile_for_gpu_plan(
    lowered: jax.stages.Lowered, options: dict[str, Any]
) -> jax.stages.Compiled:
    """Compile for described GPUs.

    If the compiler of JAX 0.10 or 0.11 finds no tiles for a product of Triton, which it would look
    for on a GPU, the products are calls of cuBLAS. Waits for the end of JAX 0.11.
    """
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not any(part in str(error) for part in _NO_TILES):
            raise
        return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False})
