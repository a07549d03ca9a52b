"""Compile options that depend on the version of JAX."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as _config

# Before JAX 0.11 XLA's CPU compiler drops optimization barriers before it combines all-reduces.
KEEPS_BARRIERS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


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
